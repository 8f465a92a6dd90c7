#!/usr/bin/env bash
# Configures projects beside tools that are there and do not work: what is looked for by AUTO is left out, with a line
# that says why.
# usage: half_installed_test.sh REPOSITORY CMAKE TORCH_DIR [NVCC]
set -euo pipefail
root=$1 cmake=$2 torch=$3 nvcc=${4:-}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  cat "$work/output"
  exit 1
}

# An MPI without its headers, as Debian's mpich without libmpich-dev.
cat >"$work/mpicxx" <<'END'
#!/bin/sh
line="g++ -I/nowhere/mpich -lmpich"
[ "$1" = -show ] && echo "$line" && exit
case $1 in -show*) exit 1 ;; esac
exec $line "$@"
END
chmod +x "$work/mpicxx"
cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(uses_mpi CXX)
include("$root/cmake/DdpFindMpi.cmake")
ddp_find_mpi(why)
message(STATUS "why: \${why}")
END

"$cmake" -S "$work" -B "$work/build" -D MPI_CXX_COMPILER="$work/mpicxx" >"$work/output" 2>&1 ||
  fail "expected a configuration without MPI"
grep -q "why: $work/mpicxx compiles no program with mpi.h" "$work/output" || fail "expected why MPI is left out"

# An nvcc that refuses the C++ compiler, but for the one that CUDAHOSTCXX names.
[[ -n $nvcc ]] || exit 0
mkdir -p "$work/toolkit/bin"
for part in include lib64 nvvm targets; do
  ln -s "$(dirname "$nvcc")/../$part" "$work/toolkit/$part"
done
cat >"$work/toolkit/bin/nvcc" <<END
#!/bin/sh
for argument; do
  case \$argument in -v | -V | --version | --dryrun | -ccbin=*) exec "$nvcc" "\$@" ;; esac
done
echo "nvcc fatal   : unsupported GNU version" >&2
exit 1
END
chmod +x "$work/toolkit/bin/nvcc"
configure() {
  env -u CUDACXX -u CUDAHOSTCXX "$@" "$cmake" -S "$root" -B "$work/ddp" -D Torch_DIR="$torch" \
    -D CUDAToolkit_ROOT="$work/toolkit" -D DDP_BUILD_TESTS=OFF -D DDP_BUILD_EXAMPLES=OFF -D DDP_WITH_MPI=OFF \
    >"$work/output" 2>&1
}
configure || fail "expected a configuration without CUDA"
grep -q "CPU only: $work/toolkit/bin/nvcc compiles no program (nvcc fatal .*unsupported GNU version" "$work/output" ||
  fail "expected why CUDA is left out"
rm -rf "$work/ddp"
configure CUDAHOSTCXX=/usr/bin/c++ || fail "expected a configuration with CUDA"
grep -q "^-- LibTorch .* (CUDA)" "$work/output" || fail "expected CUDA with another C++ compiler"
