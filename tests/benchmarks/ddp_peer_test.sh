#!/usr/bin/env bash
# ddp_peer_test.sh REPOSITORY DDPRUN DDP_BENCH: runs benchmarks/peers/ddp_peer.py beside ddp_bench and
# checks that its lines of JSON have the same keys.
# Exit code: 0 as expected, 1 not, 77 skipped because there is no Python with torch.
set -euo pipefail
root=$1 ddprun=$2 bench=$3
python=$("$root/scripts/python_with_torch.sh") || {
  echo "skipped: no Python with torch"
  exit 77
}

lines_of() { # PROGRAM...
  "$ddprun" -n 2 --no-prefix "$@" --model mnist --warmup 3 --iters 1 --rounds 1
}
keys_of() { # LINES
  sed -E 's/("[a-z0-9_]+"): *("[^"]*"|[^,}]+)/\1/g; s/, /,/g' <<<"$1"
}
expect() { # WHAT EXPECTED GOT
  [[ $2 == "$3" ]] || {
    echo "FAILED: $1: expected
$2
got
$3"
    exit 1
  }
}

ours=$(lines_of "$bench" --modes none,ddp)
peers=$(lines_of "$python" "$root/benchmarks/peers/ddp_peer.py" --modes none,py_ddp)
expect "the peer's modes" $'none\npy_ddp' "$(sed -E 's/.*"mode": "([^"]*)".*/\1/' <<<"$peers")"
expect "the peer's keys" "$(keys_of "$ours")" "$(keys_of "$peers")"
echo "ddp_peer.py: the keys of ddp_bench"
