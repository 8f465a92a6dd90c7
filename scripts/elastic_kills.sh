#!/usr/bin/env bash
# Kills ranks of elastic trainings at random, one or two at once, and compares the bits at the end with
# those of a run without failures.
# usage: elastic_kills.sh [KILLS [SEED]]; 20 kills by default
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/build.sh" elastic_process_test
DDP_ELASTIC_KILLS=${1:-20} DDP_TEST_SEED=${2:-1} \
  "$root/build/release/bin/elastic_process_test" "random kills"
