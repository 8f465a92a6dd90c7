#!/usr/bin/env bash
# A launcher for CMake that compiles by another compiler than the project's, without the options that
# only GCC knows. usage: by_compiler.sh COMPILER [LAUNCHER...] -- PROJECTS_COMPILER ARGUMENTS...
compiler=$1
shift
launcher=()
while [[ $1 != -- ]]; do
  launcher+=("$1")
  shift
done
shift 2
arguments=()
makes_header=no
output=
for ((i = 1; i <= $#; ++i)); do
  argument=${!i}
  case $argument in
    --param=ggc-*) continue ;;
    c++-header) makes_header=yes ;;
    -o) next=$((i + 1)) && output=${!next} ;;
  esac
  arguments+=("$argument")
done
# Clang would read the precompiled header of the build before in place of the header that it is made
# of: without timestamps the old declarations stay, and the output depends on itself.
[[ $makes_header == no ]] || rm -f -- "$output"
exec "${launcher[@]}" "$compiler" "${arguments[@]}"
