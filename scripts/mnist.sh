#!/usr/bin/env bash
# Sets up, builds and trains MNIST on two ranks. Arguments go to the program: see mnist --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/build/release/bin

"$root/scripts/build.sh" ddprun mnist
exec "$bin/ddprun" -n 2 "$bin/mnist" "$@"
