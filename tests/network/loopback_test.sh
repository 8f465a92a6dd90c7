#!/usr/bin/env bash
# loopback_test.sh DDPRUN MINIMAL: hosts whose loopback interface is down, or has no IPv4 address, or whose
# localhost is ::1 first; a rank 0 that is on another host than MASTER_ADDR.
# Exit code: 0 as expected, 1 not, 77 skipped because this user cannot make a network.
set -uo pipefail
ddprun=$1 minimal=$2
unshare --net true 2>/dev/null && command -v ip >/dev/null || {
  echo "skipped: cannot make a network"
  exit 77
}

only_v6() { # COMMAND...
  unshare --net bash -c 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"' - "$@" 2>&1
}
localhost_v6_first() { # COMMAND...
  unshare --net --mount bash -c 'ip link set lo up && hosts=$(mktemp) && trap "rm $hosts" EXIT &&
    printf "::1 localhost\n127.0.0.1 localhost\n" >"$hosts" && mount --bind "$hosts" /etc/hosts && "$@"' - "$@" 2>&1
}
expect() { # WHAT TEXT OUTPUT
  [[ $3 == *"$2"* ]] || {
    echo "FAILED: $1: expected \"$2\", got"
    echo "$3"
    exit 1
  }
}

expect "a process alone, without a network" "y = " "$(unshare --net "$minimal" 2>&1)"
expect "two ranks over IPv6" "y = " "$(only_v6 "$ddprun" -n 2 "$minimal")"
expect "two ranks over IPv6, which may be replaced" "y = " "$(only_v6 "$ddprun" -n 2 --elastic "$minimal")"
expect "two ranks whose localhost is ::1 first" "y = " \
  "$(localhost_v6_first timeout 60 "$ddprun" -n 2 --master-addr localhost "$minimal")"
expect "a rank whose localhost is ::1 first" "y = " \
  "$(MASTER_ADDR=localhost MASTER_PORT=29500 RANK=0 WORLD_SIZE=1 localhost_v6_first timeout 60 "$minimal")"
# Long before the timeout, which is half an hour.
expect "an address that the host lacks" \
  "expected an address that a loopback interface has, got 127.0.0.1 on rank 0 of 2, which this one lacks. Set MASTER_ADDR (or the host in tcp://) to ::1" \
  "$(MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2 only_v6 "$minimal")"

# Rank 0 is on 10.86.1.1, and the others look for it on 10.86.1.2, another host.
own=ddpown$$ other=ddpother$$
beside() { # COMMAND...
  ip link add eth0 netns "$own" type veth peer name eth0 netns "$other" &&
    ip -n "$own" addr add 10.86.1.1/24 dev eth0 && ip -n "$own" link set eth0 up &&
    ip -n "$other" addr add 10.86.1.2/24 dev eth0 && ip -n "$other" link set eth0 up &&
    ip netns exec "$own" "$@" 2>&1
}
if ip netns add "$own" 2>/dev/null; then
  trap 'ip netns del "$own"; ip netns del "$other"' EXIT
  ip netns add "$other" && ip -n "$own" link set lo up
  expect "a rank 0 beside its address" \
    "expected rank 0 on the host of MASTER_ADDR (or tcp://), \"10.86.1.2\" with 10.86.1.2, got a host with 10.86.1.1, 127.0.0.1 on rank 0 of 2, and nothing answers there at port 29500: Connection refused" \
    "$(MASTER_ADDR=10.86.1.2 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2 beside "$minimal")"
fi
echo "loopback interfaces: down, and without IPv4; localhost as ::1; a rank 0 beside its address"
