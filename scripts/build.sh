#!/usr/bin/env bash
# Sets up, configures build/release and builds the given targets, or everything when none is given.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release

"$root/scripts/setup.sh"

mkdir -p "$build"
# LibTorch's package prints a page of status and two harmless warnings; they matter when it fails.
(cd "$root" && cmake --preset release) >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
if (($# > 0)); then
  cmake --build "$build" --target "$@"
else
  cmake --build "$build"
fi
