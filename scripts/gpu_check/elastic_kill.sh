#!/usr/bin/env bash
# elastic_kill.sh BIN BACKEND adamw|zero: an elastic job of two ranks that may share the first GPU, of which
# one is killed in its backward pass (SIGKILL) and replaced. Expects the bits of a job without the kill.
# BIN has ddprun and ddp_elastic_kill. Ends with 1 where the bits differ, or a job fails.
set -uo pipefail
bin=$1 backend=$2 optimizer=$3
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=scripts/gpu_check/sharing.sh
source "$here/sharing.sh"

# A slot is the launcher's number of a process, which its replacement has, too.
# shellcheck disable=SC2016 # a rank's shell expands it
rank='NCCL_HOSTID=slot$DDP_SLOT LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec "$@"'
job() { # quiet|killed
  "$bin/ddprun" -n 2 --elastic -- \
    bash -c "$rank" rank "$bin/ddp_elastic_kill" "$backend" "$optimizer" "$1" 2>&1
}
fail() {
  printf 'failed: %s. The jobs, without and with the kill:\n%s\n---\n%s\n' "$1" "$quiet" "$killed"
  exit 1
}
# The hashes at the end, once each; how many ranks came to it; and those of the first generation.
hashes() { sed -n 's/.*the end at step 24 .*hash //p' <<<"$1" | sort -u; }
ends() { grep -c 'the end at step 24 ' <<<"$1"; }
first_ends() { grep -c 'the end at step 24 of generation 1,' <<<"$1"; }

killed=""
quiet=$(job quiet) || fail "the job without the kill ended with status $?"
[[ $(ends "$quiet") == 2 && $(first_ends "$quiet") == 2 ]] ||
  fail "the job without the kill: expected two ranks at the end of one generation"
killed=$(job killed) || fail "the job with the kill ended with status $?"
grep -q 'was killed by signal 9 (SIGKILL); starting another one' <<<"$killed" || fail "no rank was killed"
[[ $(ends "$killed") == 2 && $(first_ends "$killed") == 0 ]] ||
  fail "the job with the kill: expected two ranks at the end of a later generation"
[[ $(hashes "$quiet" | wc -l) == 1 && $(hashes "$killed") == "$(hashes "$quiet")" ]] ||
  fail "expected the parameters of the job without the kill, to the bit"
grep 'generation 2\|the end' <<<"$killed"
echo "ok: the bits of the job without the kill"
