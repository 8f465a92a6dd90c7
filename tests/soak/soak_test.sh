#!/usr/bin/env bash
# Runs a short soak, and checks that it detects these kinds of leaks: soak_test.sh DDPRUN SOAK_WORLD
# TWIN...
set -euo pipefail
ddprun=$1 world=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

soak() { # TWIN ARGUMENTS...
  DDP_SOAK_TWIN=$1 "$ddprun" -n 2 "$world" "${@:2}" "$folder/$1.$2.$4" 2>&1
}
for what in "steps 1500 shm" "steps 600 gloo" "cycles 40 shm"; do
  # shellcheck disable=SC2086
  soak "" $what || { echo "FAILED: $what grew"; exit 1; }
done
for twin; do
  if soak "$twin" steps 600 shm >"$folder/log"; then
    cat "$folder/log"
    echo "FAILED: a leak of a $twin a step was not seen"
    exit 1
  fi
done
