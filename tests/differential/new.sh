#!/usr/bin/env bash
# new.sh DIFFERENTIAL FILE: a minute of programs of new seeds. Ends with 1 at a finding, and leaves it in FILE.
set -uo pipefail
"$1" --seconds 60 --no-pairs 2>&1 | tee "$2"
status=${PIPESTATUS[0]}
((status != 0)) || rm -f "$2"
exit "$status"
