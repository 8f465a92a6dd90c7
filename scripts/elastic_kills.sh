#!/usr/bin/env bash
# Looks for faults of elastic trainings, and ends with an error where one is found:
#   SCHEDULES  of a simulated job, with deaths, stops, hangs, cuts, joins, leaves and broken connections; a million takes
#              11 minutes of a core
#   RUNS       of trainings that lose a rank, and another one while the rest recovers
#   KILLS      at random, of trainings that have to end with the bits of one without failures
# usage: elastic_kills.sh [SCHEDULES [RUNS [KILLS [SEED]]]]; default: 100000 50 20 1. Each SEED draws others.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
schedules=${1:-100000} runs=${2:-50} kills=${3:-20} seed=${4:-1}

"$root/scripts/build.sh" ddprun elastic elastic_process_test elastic_training_world launch_membership_test
bin=$root/build/release/bin
export DDP_TEST_SEED=$seed

echo "elastic kills: $schedules schedules"
DDP_SCHEDULES=$schedules "$bin/launch_membership_test" "random schedules*,broken connections*"
for program in "" --example; do
  echo "elastic kills: $runs double failures $program"
  python3 -B "$root/tests/soak/double_failures.py" "$bin" --runs "$runs" $program \
    --seed $(((seed - 1) * runs + 1)) --keep "$root/build/release/double_failures$program"
done
echo "elastic kills: $kills kills"
DDP_ELASTIC_KILLS=$kills "$bin/elastic_process_test" "random kills"
