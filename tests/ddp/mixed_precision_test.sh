#!/usr/bin/env bash
# The wrapper's mixed_precision beside Python's arithmetic: the same losses and parameters on two ranks.
# mixed_precision_test.sh DDPRUN PROGRAM REPOSITORY
set -euo pipefail

repository=$3
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
OMP_NUM_THREADS=1 "$python" -W ignore "$repository/tests/ddp/mixed_precision.py" "$1" "$2" "$folder"
