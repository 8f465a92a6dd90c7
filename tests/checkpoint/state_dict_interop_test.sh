#!/usr/bin/env bash
# Python's state_dicts load here, ours load in Python, and training continues with the same losses.
# state_dict_interop_test.sh PROGRAM REPOSITORY
set -euo pipefail

program=$1
repository=$2
if ! python=$("$repository/scripts/python_with_torch.sh" 2>/dev/null); then
  echo "skipped: no Python has torch"
  exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/python" "$folder/cpp"
script=$repository/tests/checkpoint/state_dict_interop.py
"$python" -W ignore "$script" save "$folder/python"
"$program" "$folder/python" "$folder/cpp"
"$python" -W ignore "$script" load "$folder/cpp"
