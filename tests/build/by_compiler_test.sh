#!/usr/bin/env bash
# Makes a precompiled header by clang, as CMake does for a project of GCC, and makes it again after
# its header changed, to one of the same size. usage: by_compiler_test.sh <cmake/by_compiler.sh> <clang++>
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

clang() { bash "$1" "$2" -- c++ --param=ggc-min-heapsize=1000000 -Winvalid-pch "${@:3}"; }
make_header() {
  clang "$@" -Xclang -fno-pch-timestamp -x c++-header -include "$work/all.hxx" -MD -MT all.hxx.gch \
    -MF all.d -o all.hxx.gch -c all.hxx.cxx
}
fail() {
  echo "FAILED: $*"
  exit 1
}

echo '#include "own.h"' >all.hxx
: >all.hxx.cxx
echo 'int result() { return latter(); }' >use.cpp
echo 'inline int before() { return 1; }' >own.h
make_header "$@"
echo 'inline int latter() { return 2; }' >own.h
make_header "$@"
clang "$@" -include "$work/all.hxx" -fsyntax-only use.cpp || fail "expected the new declarations"
grep -q 'own\.h' all.d || fail "expected the header to depend on what it includes: $(<all.d)"
! sed 's/^[^:]*://' all.d | grep -q '\.gch' || fail "expected no dependency on itself: $(<all.d)"
echo passed
