#!/usr/bin/env bash
# loopback_test.sh DDPRUN MINIMAL: hosts whose loopback interface is down, or has no IPv4 address.
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
# Long before the timeout, which is half an hour.
expect "an address that the host lacks" \
  "expected an address that a loopback interface has, got 127.0.0.1 on rank 0 of 2, which this one lacks. Set MASTER_ADDR (or the host in tcp://) to ::1" \
  "$(MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2 only_v6 "$minimal")"
echo "loopback interfaces: down, and without IPv4"
