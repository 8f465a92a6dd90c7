#!/usr/bin/env bash
# Configures a project that looks for an MPI whose compiler is there and whose headers are not, as Debian's mpich
# without libmpich-dev.
# usage: broken_mpi_test.sh REPOSITORY CMAKE
set -euo pipefail
root=$1 cmake=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  cat "$work/output"
  exit 1
}

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
