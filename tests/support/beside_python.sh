#!/usr/bin/env bash
# Runs a test's Python script with the installed torch; skips the test where there is none.
# beside_python.sh REPOSITORY SCRIPT ARGUMENTS...; an argument {} becomes an empty folder, which is
# removed after the test.
set -euo pipefail

repository=$1
script=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
arguments=()
for argument in "$@"; do
  [[ $argument != "{}" ]] || argument=$folder
  arguments+=("$argument")
done
status=0
OMP_NUM_THREADS=1 "$repository/scripts/python_with_torch.sh" "$script" "${arguments[@]}" || status=$?
[[ $status != 77 ]] || echo "skipped: no Python has torch"
exit "$status"
