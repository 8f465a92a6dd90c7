#!/usr/bin/env bash
# Sets up, builds and trains CIFAR-10's example on two ranks, on a data set of drawn shapes, or on
# CIFAR-10 itself: cifar.sh --data FOLDER. Arguments go to the program: see cifar10 --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/build/release/bin

"$root/scripts/build.sh" ddprun cifar10
exec "$bin/ddprun" -n 2 "$bin/cifar10" "$@"
