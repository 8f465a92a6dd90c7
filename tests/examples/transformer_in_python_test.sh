#!/usr/bin/env bash
# The transformer's losses beside those of the same model in Python, from the same weights.
# transformer_in_python_test.sh DDPRUN PROGRAM REPOSITORY
set -euo pipefail

ddprun=$1
program=$2
repository=$3
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
OMP_NUM_THREADS=1 "$python" -W ignore "$repository/tests/examples/transformer_in_python.py" \
  "$ddprun" "$program" "$repository" "$folder"
