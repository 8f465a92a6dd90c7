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
exec ctest --test-dir "$build" --output-on-failure --no-label-summary \
  --parallel $((4 * $(nproc))) "$@"
