#!/usr/bin/env bash
# Runs scripts/mnist.sh with stand-ins for the build and for ddprun.
# usage: mnist_script_test.sh <the scripts folder>
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin="$work/a checkout/build/release/bin"
mkdir -p "$work/a checkout/scripts" "$bin"
cp "$1/mnist.sh" "$work/a checkout/scripts"
script="$work/a checkout/scripts/mnist.sh"

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

expect() { # WHAT OPTIONS
  local expected="build ddprun mnist
<-n><2>$2<$bin/mnist><--epochs><3><--save><a file>"
  [[ ${output//$'\r'/} == "$expected" && $status == 5 ]] || {
    printf 'FAILED: %s: expected status 5 and\n%s\ngot status %s and\n%s\n' \
      "$1" "$expected" "$status" "$output"
    exit 1
  }
}

status=0
output=$("$script" --epochs 3 --save "a file") || status=$?
expect "into a pipe" ""

status=0
output=$(script -q -e -c "'$script' --epochs 3 --save 'a file'" /dev/null </dev/null) || status=$?
expect "on a terminal" "<--no-prefix>"

echo "mnist.sh: all as expected"
