#!/usr/bin/env bash
# Every learning-rate schedule has Python's rates, to the last digit, also where it goes on from a
# file.
# lr_schedules_test.sh PROGRAM REPOSITORY
set -euo pipefail

program=$1
repository=$2
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
"$python" -W ignore "$repository/tests/training/lr_schedules.py" "$program"
