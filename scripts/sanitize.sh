#!/usr/bin/env bash
# Builds everything with a sanitizer, in build/asan or build/tsan, and runs every test under it.
# usage: sanitize.sh asan|tsan [ARGUMENTS OF ctest...]; asan finds wrong accesses, undefined behavior
# and leaks, tsan data races. Takes an hour on two cores.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1-} in
  asan | tsan) preset=$1 ;;
  --help | -h)
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *)
    echo "sanitize.sh: expected asan or tsan, got '${1-}'" >&2
    exit 2
    ;;
esac
shift

"$root/scripts/setup.sh"
cd "$root"
mkdir -p "build/$preset"
cmake --preset "$preset" >"build/$preset/configure.log" 2>&1 || {
  cat "build/$preset/configure.log" >&2
  exit 1
}
cmake --build "build/$preset"
# The fault matrix gives its ranks seconds to notice a fault and to end: eight worlds of instrumented
# ranks at a time do not keep to that. The other tests of the monitor, which take longer, run.
if [[ $preset == tsan ]]; then
  set -- --exclude-regex '^fault_matrix$' "$@"
fi
# Less than test.sh: instrumented code seldom waits.
cores=$(getconf _NPROCESSORS_ONLN) # nproc would say what OMP_NUM_THREADS does
exec ctest --preset "$preset" --no-label-summary --parallel $((2 * cores)) "$@"
