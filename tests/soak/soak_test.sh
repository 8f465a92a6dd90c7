#!/usr/bin/env bash
# Runs a short soak, and checks that it detects these kinds of leaks: soak_test.sh DDPRUN SOAK_WORLD
# TWIN...
set -euo pipefail

ddprun=$1 world=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

soak() { # ARGUMENTS...
  "$ddprun" -n 2 "$world" "$@" "$(mktemp -d -p "$folder")" 2>&1
}
for what in "steps 1000 shm" "steps 600 gloo" "cycles 40 shm"; do
  # shellcheck disable=SC2086
  soak $what || { echo "FAILED: $what grew"; exit 1; }
done

export DDP_SOAK_TWINS=$*
if soak steps 600 shm >"$folder/log"; then
  cat "$folder/log"
  echo "FAILED: leaks of $* a step were not seen"
  exit 1
fi
for twin; do
  case $twin in
    memory) grown='memory [1-9][0-9]*\.[0-9]+%' ;; # 1% or more
    *) grown="${twin}s ([1-9][0-9]*\.[0-9]+|0\.[0-9]*[1-9][0-9]*)%" ;;
  esac
  grep -Eq "grew by:.* $grown" "$folder/log" || {
    cat "$folder/log"
    echo "FAILED: a leak of a $twin a step was not seen"
    exit 1
  }
done
