#!/usr/bin/env bash
# The profiler's names, counts and tables are Python's.
# profiler_test.sh PROGRAM REPOSITORY
set -euo pipefail

program=$1
repository=$2
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
OMP_NUM_THREADS=1 "$python" -W ignore "$repository/tests/training/profiler.py" "$program"
