#!/usr/bin/env bash
# ddp_peer_test.sh REPOSITORY DDPRUN DDP_BENCH: runs benchmarks/peers/ddp_peer.py and ddp_bench, and
# checks that their lines of JSON have the same keys, and that both train each model to the same
# sum.
# Exit code: 0 as expected, 1 not, 77 skipped because there is no Python with torch.
set -euo pipefail
root=$1 ddprun=$2 bench=$3
# Each rank in Python imports torch, which takes 2 to 3 s. So only one model trains on two ranks, and
# the others show on one that they are alike.
peer=("$root/scripts/python_with_torch.sh" "$root/benchmarks/peers/ddp_peer.py")

lines_of() { # RANKS MODEL PROGRAM...
  local status=0
  "$ddprun" -n "$1" --no-prefix "${@:3}" --model "$2" --warmup 3 --iters 1 --rounds 1 || status=$?
  [[ $status != 77 ]] || echo "skipped: no Python with torch" >&2
  return "$status"
}
values_of() { # KEY LINES
  sed -nE "s/.*\"$1\": *\"?([^\",}]+).*/\1/p" <<<"$2"
}
are_alike() { # CHECKSUM CHECKSUM; but for rounding: another parameter or sample changes more
  awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0 && b > 0 && (a - b)^2 < (1e-10 * a)^2) }'
}
keys_of() { # LINES
  sed -E 's/("[a-z0-9_]+"): *("[^"]*"|\[[^]]*\]|[^,}]+)/\1/g; s/, /,/g' <<<"$1" | sort -u
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

all=py_ddp,py_ddp_view,py_ddp_unused,py_ddp_static
for model in mnist mlp small_params transformer; do # resnet18 takes too long here
  modes=py_ddp ranks=1
  [[ $model != mnist ]] || modes=$all ranks=2
  ours=$(lines_of "$ranks" "$model" "$bench" --modes ddp)
  peers=$(lines_of "$ranks" "$model" "${peer[@]}" --modes "$modes")
  expect "the peer's modes" "${modes//,/$'\n'}" "$(values_of mode "$peers")"
  expect "the peer's keys" "$(keys_of "$ours")" "$(keys_of "$peers")"
  for checksum in $(values_of checksum "$peers"); do
    are_alike "$checksum" "$(values_of checksum "$ours")" ||
      expect "the checksum of $model" "$(values_of checksum "$ours")" "$checksum"
  done
done

ours=$(lines_of 1 mnist "$bench" --memory --modes ddp)
peers=$(lines_of 1 mnist "${peer[@]}" --memory --modes py_ddp)
expect "the keys of the peer's memory" "$(keys_of "$ours")" "$(keys_of "$peers")"
expect "the bytes of the peer's gradients" "$(values_of bytes "$ours")" "$(values_of bytes "$peers")"
echo "ddp_peer.py: trains as ddp_bench"
