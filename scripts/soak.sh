#!/usr/bin/env bash
# Trains for long on two ranks, with everything that a training may do, drawn by chance, and ends with
# an error where memory grows by 1% or more, or descriptors or mappings by any. Takes ten minutes.
# usage: soak.sh [STEPS [CYCLES]]; default: 10000 100
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/build.sh" ddprun soak_world
bin=$root/build/release/bin
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
for backend in shm gloo; do
  echo "soak: ${1:-10000} steps over $backend"
  "$bin/ddprun" -n 2 "$bin/soak_world" steps "${1:-10000}" $backend "$folder/$backend"
  echo "soak: ${2:-100} cycles over $backend"
  "$bin/ddprun" -n 2 "$bin/soak_world" cycles "${2:-100}" $backend "$folder/cycles.$backend"
done
