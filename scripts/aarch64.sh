#!/usr/bin/env bash
# Checks that the library compiles for 64-bit ARM: its syntax, by Debian's cross compiler, with the headers of
# the LibTorch that setup.sh made ready, which are the same on all processors. Links and runs nothing.
# usage: aarch64.sh [--setup]; --setup installs g++-aarch64-linux-gnu, as root or through sudo.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/aarch64

case ${1-} in
  --setup) "$root/scripts/setup.sh" --aarch64 ;;
  "") "$root/scripts/setup.sh" ;;
  *)
    echo "usage: aarch64.sh [--setup]" >&2
    exit 1
    ;;
esac

# The options of a release are for sources alone: CMake tries what the compiler can do with those of a debug
# build, and without -fsyntax-only. Few compilations of many sources, for LibTorch's headers take the time.
mkdir -p "$build"
cmake -S "$root" -B "$build" -G Ninja -D CMAKE_BUILD_TYPE=Release \
  -D CMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64-linux-gnu.cmake" \
  -D CMAKE_CXX_FLAGS_RELEASE="-O1 -fsyntax-only" -D DDP_WERROR=ON \
  -D DDP_UNITY=ON -D CMAKE_UNITY_BUILD_BATCH_SIZE=40 -D DDP_PCH=OFF -D DDP_USE_CCACHE=OFF \
  -D DDP_BUILD_TESTS=OFF -D DDP_BUILD_EXAMPLES=OFF -D DDP_BUILD_BENCHMARKS=OFF -D DDP_INSTALL=OFF \
  >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
cmake --build "$build" --target ddp_rooms ddp_launch
echo "aarch64: all rooms compile"
