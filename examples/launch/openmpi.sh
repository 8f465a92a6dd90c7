#!/bin/bash
# Ranks on the hosts of a hostfile, or on this one.
#   openmpi.sh 4 ./train --epochs 6
#   HOSTFILE=hosts MASTER_ADDR=host0 openmpi.sh 8 ./train --epochs 6
# mpirun gives ranks their numbers. On one host ddp finds the rest by itself; over several it needs rank
# 0's host, and a port that is free there: MASTER_PORT, or a random one.
set -euo pipefail
ranks=${1:?usage: openmpi.sh RANKS PROGRAM [ARGUMENTS...]}
shift
options=(-n "$ranks" --tag-output)
# Ranks of one host share its cores; by default each has one thread.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
options+=(-x OMP_NUM_THREADS)
if [[ -n ${HOSTFILE:-} ]]; then
  : "${MASTER_ADDR:?MASTER_ADDR: expected the host of rank 0, the first of $HOSTFILE}"
  export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((10000 + RANDOM % 20000))}
  options+=(--hostfile "$HOSTFILE" -x MASTER_ADDR -x MASTER_PORT)
else
  options+=(--oversubscribe)
fi
# Open MPI refuses to run as root without this option, which containers need.
[[ $(id -u) != 0 ]] || options+=(--allow-run-as-root)
exec mpirun "${options[@]}" "$@"
