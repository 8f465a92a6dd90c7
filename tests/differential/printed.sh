#!/usr/bin/env bash
# Compares a printed program that is kept as a test with what the generator prints of it now.
# usage: printed.sh DIFFERENTIAL FILE; to keep it as it is printed now: DIFFERENTIAL --cpp --program '...' > FILE
set -euo pipefail
program=$(sed -n '2s|^// ||p' "$2")
diff -u "$2" <("$1" --cpp --program "$program")
