#!/usr/bin/env bash
# no_shared_memory_test.sh DDPRUN WORLD: ranks that do not see each other's processes, as in two
# containers, get Gloo by default, and the log says why; a request for shm is refused.
# Exit code: 0 as expected, 1 not, 77 skipped because this user cannot make a namespace.
set -uo pipefail
ddprun=$1 world=$2
unshare --pid --fork true 2>/dev/null || {
  echo "skipped: cannot make a namespace of processes"
  exit 77
}

run() { # BACKEND
  "$ddprun" -n 2 --no-prefix -- bash -c \
    'if [ "$RANK" = 1 ]; then exec unshare --pid --fork "$@"; else exec "$@"; fi' - \
    "$world" backend "$1" 2>&1
}
expect() { # WHAT TEXT COUNT OUTPUT
  [[ $(grep -cF "$2" <<<"$4") == "$3" ]] || {
    echo "FAILED: $1: expected $3 lines with
$2
got
$4"
    exit 1
  }
}

export TORCH_CPP_LOG_LEVEL=INFO
out=$(run "") || { echo "FAILED: the default backend: $out"; exit 1; }
expect "what the ranks use" "uses gloo" 2 "$out"
expect "what the log says" 'default_pg: backend("") chose "gloo" for CPU tensors, for no two ranks are on one host and in one container.' 1 "$out"

out=$(run shm) && { echo "FAILED: shm was not refused: $out"; exit 1; }
expect "the refusal" "backend shm: expected ranks of a host to map each other's memory, but no two ranks are on one host and in one container. Start at least two of them on one host" 2 "$out"
echo "no shared memory: Gloo, or refused"
