#!/bin/sh
# torchrun_restart_test.sh TORCHRUN WORLD: rank 1 of the program WORLD fails once; torchrun starts
# all ranks again, and they must connect over the same store.
# Exit code: 0 as expected, 1 not, 77 skipped because torchrun is not usable here.
set -u
torchrun=$1 world=$2
case $torchrun in *NOTFOUND) echo "skipped: no torchrun is installed"; exit 77 ;; esac

# --standalone chooses a free port; a fixed one could be taken.
if ! output=$("$torchrun" --no-python --standalone --nproc-per-node 3 --max-restarts 1 \
  --monitor-interval 0.1 "$world" fail-once 2>&1); then
  printf '%s\n' "$output"
  "$torchrun" --help >/dev/null 2>&1 && exit 1
  echo "skipped: $torchrun does not run"
  exit 77
fi
case $output in
  *"rank 1 fails once"*) echo "restarted and met again" ;;
  *)
    echo "FAILED: the first attempt should have failed, or this shows nothing"
    exit 1
    ;;
esac
