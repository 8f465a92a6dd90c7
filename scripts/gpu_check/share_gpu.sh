#!/usr/bin/env bash
# share_gpu.sh RANKS COMMAND...: runs a command as ranks over NCCL that share the first GPU. Ends with
# the status of a rank that failed; of rank JUDGED alone, where that is set.
set -uo pipefail
ranks=$1
shift

free_port() {
  python3 -c 'import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])'
}

# shellcheck source=scripts/gpu_check/sharing.sh
source "$(dirname "${BASH_SOURCE[0]}")/sharing.sh"
export WORLD_SIZE=$ranks LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$(free_port) || exit 2
DDP_SECOND_STORE=$(mktemp -u)
export MASTER_PORT DDP_SECOND_STORE
pids=()
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank NCCL_HOSTID=rank$rank "$@" &
  pids+=($!)
done
trap 'kill -9 "${pids[@]}" 2>/dev/null; rm -f "$DDP_SECOND_STORE"' EXIT
trap 'exit 143' TERM INT
worst=0
for ((rank = 0; rank < ranks; ++rank)); do
  wait "${pids[rank]}"
  status=$?
  ((status == 0)) && continue
  echo "rank $rank ended with status $status"
  [[ ${JUDGED:-$rank} == "$rank" ]] && worst=$status
done
exit "$worst"
