#!/usr/bin/env bash
# Sets up, builds and trains MNIST on two ranks. Arguments go to the program: see mnist --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/build/release/bin

"$root/scripts/build.sh" ddprun mnist
options=(-n 2)
# The progress bar needs the terminal itself, not ddprun's pipe.
if [[ -t 1 ]]; then
  options+=(--no-prefix)
fi
exec "$bin/ddprun" "${options[@]}" "$bin/mnist" "$@"
