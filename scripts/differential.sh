#!/usr/bin/env bash
# Draws training programs, runs each on ranks over every CPU backend, and compares it with one process. Two processes a
# core do so, because programs that end in an error wait, with seeds of their own. Ends with 1 where a program differs,
# and prints the smallest one that does.
#   differential.sh                      ten minutes
#   differential.sh 3600                 an hour
#   differential.sh 600 --only training=fsdp --ranks 4 --keep-going; `differential --help` lists the options
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
seconds=600
if [[ ${1-} =~ ^[0-9]+$ ]]; then
  seconds=$1
  shift
fi
"$root/scripts/build.sh" differential
export OMP_NUM_THREADS=1
running=() status=0
for ((process = 0; process < 2 * $(nproc); ++process)); do
  "$root/build/release/bin/differential" --seconds "$seconds" --no-pairs "$@" &
  running+=($!)
done
for one in "${running[@]}"; do
  wait "$one" || status=$?
done
exit "$status"
