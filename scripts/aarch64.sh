#!/usr/bin/env bash
# Checks that the library compiles for 64-bit ARM: its syntax, with the headers of the LibTorch that setup.sh
# made ready, which are the same on all processors. Links and runs nothing.
# usage: aarch64.sh [--setup] [--gcc]
#   --setup  installs g++-aarch64-linux-gnu and clang, as root or through sudo
#   --gcc    by the cross compiler; without, by clang with its headers, in a third of the time
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/aarch64
setup=() compiler=clang
while (($# > 0)); do
  case $1 in
    --setup) setup=(--aarch64) ;;
    --gcc) compiler=gcc build+=-gcc ;;
    *)
      echo "usage: aarch64.sh [--setup] [--gcc]" >&2
      exit 1
      ;;
  esac
  shift
done
"$root/scripts/setup.sh" "${setup[@]}"

# The options of a release are for sources alone: CMake tries what the compiler can do with those of a debug
# build. Few compilations of many sources, for LibTorch's headers take the time.
options=(-D CMAKE_BUILD_TYPE=Release -D CMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64-linux-gnu.cmake"
  -D DDP_WERROR=ON -D DDP_UNITY=ON -D CMAKE_UNITY_BUILD_BATCH_SIZE=40 -D DDP_USE_CCACHE=OFF
  -D DDP_BUILD_TESTS=OFF -D DDP_BUILD_EXAMPLES=OFF -D DDP_BUILD_BENCHMARKS=OFF -D DDP_INSTALL=OFF)
if [[ $compiler == gcc ]]; then
  options+=(-D CMAKE_CXX_FLAGS_RELEASE="-O1 -fsyntax-only" -D DDP_PCH=OFF)
else
  # A plain char has no sign there, which -Wextra finds with GCC only.
  options+=(-D CMAKE_CXX_COMPILER=clang++ -D CMAKE_CXX_COMPILER_LAUNCHER="$root/cmake/syntax_only.sh"
    -D CMAKE_CXX_FLAGS_RELEASE="-O0 -Wtype-limits" -D DDP_PCH=ON)
fi
# Of MPI too, the headers are the same.
targets=(ddp_rooms ddp_launch ddp_launch_ranks)
if command -v mpicxx >/dev/null; then
  options+=(-D MPI_CXX_COMPILER="$(command -v mpicxx)" -D CMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY)
  targets+=(CMakeFiles/ddp_mpi.dir/Unity/unity_0_cxx.cxx.o) # the library would need the object
fi
mkdir -p "$build"
cmake -S "$root" -B "$build" -G Ninja "${options[@]}" >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
cmake --build "$build" --target "${targets[@]}"
echo "aarch64: all rooms compile"
