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
for argument in "$@"; do
  case $argument in
    --param=ggc-*) ;;
    *) arguments+=("$argument") ;;
  esac
done
exec "${launcher[@]}" "$compiler" "${arguments[@]}"
