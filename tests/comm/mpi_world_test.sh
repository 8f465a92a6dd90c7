#!/usr/bin/env bash
# Has mpirun start ranks of mpi_world. Without an mpirun the test is skipped.
# usage: mpi_world_test.sh MPIRUN RANKS WORLD CASE
set -euo pipefail
mpirun=$1 ranks=$2 world=$3 case=$4

if ! command -v "$mpirun" >/dev/null; then
  echo "skipped: there is no mpirun"
  exit 77
fi
# What Open MPI asks of root, and of hosts with fewer cores than ranks.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
exec "$mpirun" -n "$ranks" "$world" "$case"
