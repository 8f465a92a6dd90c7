#!/bin/sh
# A launcher for CMake: compiles nothing but precompiled headers, and checks the rest.
# usage: syntax_only.sh COMPILER ARGUMENTS...
case " $* " in
  *" -emit-pch "*) exec "$@" -Xclang -fpch-instantiate-templates ;;
esac
exec "$@" -fsyntax-only
