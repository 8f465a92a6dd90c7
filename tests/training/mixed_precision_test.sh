#!/usr/bin/env bash
# GradScaler and AutocastGuard beside Python's: the same scales, skipped steps and losses.
# mixed_precision_test.sh PROGRAM REPOSITORY
set -euo pipefail

program=$1
repository=$2
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
OMP_NUM_THREADS=1 "$python" -W ignore "$repository/tests/training/mixed_precision.py" \
  "$program" "$folder"
