#!/usr/bin/env bash
# Sets up, builds everything and runs every test, up to four at once a core: most of them wait. Arguments
# go to ctest, for instance -R reducer; --torch VERSION before them tries another LibTorch, see
# build.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release
version=()

if [[ ${1-} == --torch ]]; then
  build=$root/build/torch-${2-}
  version=("${@:1:2}")
  shift "${#version[@]}"
fi
"$root/scripts/build.sh" "${version[@]}"
status=0
ctest --test-dir "$build" --output-on-failure --no-label-summary \
  --parallel $((4 * $(nproc))) "$@" || status=$?
# Once more at the end, because other tests have written after them.
if ((status != 0)); then
  awk '
    /^[0-9]+\/[0-9]+ Testing: / { name = $3; count = 0 }
    { last[count++ % 30] = $0 }
    /^Test Failed/ {
      print "---- the end of " name ":"
      for (i = count > 30 ? count - 30 : 0; i < count; ++i) print last[i % 30]
    }' "$build/Testing/Temporary/LastTest.log"
fi
finding=$build/differential_finding.txt
if [[ -s $finding ]]; then
  echo "differential: a program of a new seed differs from one process. The tests do not fail for it:"
  grep -v '^\[W' "$finding" || true
fi
exit "$status"
