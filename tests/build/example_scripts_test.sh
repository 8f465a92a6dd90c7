#!/usr/bin/env bash
# Runs scripts/mnist.sh and scripts/cifar.sh with stand-ins for the build and for ddprun.
# usage: example_scripts_test.sh <the scripts folder>
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin="$work/a checkout/build/release/bin"
mkdir -p "$work/a checkout/scripts" "$bin"
cp "$1/mnist.sh" "$1/cifar.sh" "$work/a checkout/scripts"

stand_in() {
  cat >"$1"
  chmod +x "$1"
}
stand_in "$work/a checkout/scripts/build.sh" <<'END'
#!/bin/sh
echo "build $*"
END
stand_in "$bin/ddprun" <<'END'
#!/bin/sh
printf '<%s>' "$@"
exit 5
END

expect() { # SCRIPT PROGRAM
  local expected="build ddprun $2
<-n><2><$bin/$2><--epochs><3><--save><a file>"
  local status=0 output
  output=$("$work/a checkout/scripts/$1" --epochs 3 --save "a file") || status=$?
  [[ $output == "$expected" && $status == 5 ]] || {
    printf 'FAILED: %s: expected status 5 and\n%s\ngot status %s and\n%s\n' \
      "$1" "$expected" "$status" "$output"
    exit 1
  }
}

expect mnist.sh mnist
expect cifar.sh cifar10
echo "mnist.sh, cifar.sh: all as expected"
