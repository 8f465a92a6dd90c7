#!/usr/bin/env bash
# Sets up, configures build/release and builds the given targets, or everything when none is given.
# usage: build.sh [--torch VERSION] [TARGETS...]; with --torch (see setup.sh) in build/torch-VERSION.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release
wheel=()

if [[ ${1-} == --torch ]]; then
  "$root/scripts/setup.sh" --torch "${2-}"
  build=$root/build/torch-$2
  wheel=(-D "DDP_TORCH_WHEEL=$2")
  shift 2
else
  "$root/scripts/setup.sh"
fi

mkdir -p "$build"
# LibTorch's package prints a page of status and two harmless warnings; they matter when it fails.
(cd "$root" && cmake --preset release -B "$build" "${wheel[@]}") >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
if (($# > 0)); then
  cmake --build "$build" --target "$@"
else
  cmake --build "$build"
fi
