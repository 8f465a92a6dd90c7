#!/usr/bin/env bash
# Trains over a network that fails: see usage() below.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END_OF_USAGE'
usage: scripts/network_faults.sh [--short] [--without] [--bin FOLDER]

Trains on two hosts, each a network namespace of this one, while the link between them fails, and
prints a table of what each rank did. Needs root, ip and tc. The namespaces and all that runs in them are
gone when it ends, but by SIGKILL.

  --short        a cut of 2 s, and a host that vanishes; about 15 s. Without: all, about 5 minutes
  --bin FOLDER   with network_world; builds nothing then
  --without      the same cases without their faults, so each fails: shows that they look

Exit code: 0 all as expected, 1 not, 77 skipped because it cannot make namespaces here.
END_OF_USAGE
}

fail() {
  echo "network_faults: $*" >&2
  exit 1
}
skip() {
  echo "skipped: $*"
  exit 77
}

short=no bin="" faulty=yes
while (($# > 0)); do
  case $1 in
    --short) short=yes ;;
    --without) faulty=no ;;
    --bin)
      (($# > 1)) || fail "$1 needs a value"
      bin=$2
      shift
      ;;
    --help | -h)
      usage
      exit
      ;;
    *)
      usage >&2
      fail "unknown argument '$1'"
      ;;
  esac
  shift
done

(($(id -u) == 0)) || skip "needs root, to make network namespaces"
for program in ip tc; do
  command -v "$program" >/dev/null || skip "needs $program (Debian's package iproute2)"
done
if [[ -z $bin ]]; then
  "$root/scripts/build.sh" network_world || exit 1
  bin=$root/build/release/bin
fi
[[ -x $bin/network_world ]] || fail "expected network_world in $bin"

work=$(mktemp -d)
hosts=("ddp_faults_$$_0" "ddp_faults_$$_1")
addresses=(10.214.0.1 10.214.0.2)
nowhere=02:00:00:00:00:ff # no interface's
ranks=()                  # by rank, its process

# Bash tells of a job that it finds killed, but not of one that was waited for in silence.
kill_and_wait() { # PROCESS...
  kill -KILL "$@"
  wait "$@"
} 2>/dev/null
stop_ranks() {
  ((${#ranks[@]} == 0)) || kill_and_wait "${ranks[@]}"
  ranks=()
}
remove_hosts() {
  stop_ranks
  local host
  for host in "${hosts[@]}"; do
    ip netns del "$host" 2>/dev/null # its end of the link goes with it
  done
}
clean_up() {
  remove_hosts
  wait
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Fresh for each case: a connection of the case before may still be sending.
make_hosts() {
  local side
  for side in 0 1; do
    ip netns add "${hosts[side]}" || return
  done
  ip link add link0 netns "${hosts[0]}" type veth peer name link1 netns "${hosts[1]}" || return
  for side in 0 1; do
    ip -n "${hosts[side]}" address add "${addresses[side]}/24" dev "link$side" &&
      ip -n "${hosts[side]}" link set lo up &&
      ip -n "${hosts[side]}" link set "link$side" up || return
  done
}

# The faults. A kernel without packet filters can drop packets all the same: no process takes those that
# are addressed to no interface.
cut() { ip -n "${hosts[1]}" link set link1 down; }
mend() { ip -n "${hosts[1]}" link set link1 up; }
drop() { # SIDE...: what these send
  local side
  for side; do
    ip -n "${hosts[side]}" neighbour replace "${addresses[1 - side]}" lladdr "$nowhere" \
      dev "link$side" nud permanent
  done
}
deliver() {
  local side
  for side in 0 1; do
    ip -n "${hosts[side]}" neighbour del "${addresses[1 - side]}" dev "link$side"
  done
}
cut_for() { cut && sleep "$1" && mend; }
drop_for() { drop 0 1 && sleep "$1" && deliver; }
# A host loses its power: no FIN and no RST tells of it.
vanish() { # SIDE
  local rank
  drop 0 1
  for rank in "${!ranks[@]}"; do
    ((rank * 2 / ${#ranks[@]} != $1)) || kill_and_wait "${ranks[rank]}"
  done
}
slow_down_for() { # SECONDS, to 1 Mbit/s
  local side
  for side in 0 1; do
    tc -n "${hosts[side]}" qdisc replace dev "link$side" root tbf rate 1mbit burst 8kb latency 1s
  done
  sleep "$1"
  for side in 0 1; do tc -n "${hosts[side]}" qdisc del dev "link$side" root; done
}
fault() { # COMMAND...
  [[ $faulty == no ]] || "$@"
}

# Half of the ranks on each host. Each writes to $work/RANK.
start() { # RANKS BACKEND STEPS SECONDS
  local rank side per_host=$(($1 / 2))
  rm -f "$work"/[0-9] # a program that still reads one must not read on
  for ((rank = 0; rank < $1; ++rank)); do
    side=$((rank / per_host))
    : >"$work/$rank"
    ip netns exec "${hosts[side]}" env "RANK=$rank" "WORLD_SIZE=$1" \
      "LOCAL_RANK=$((rank % per_host))" "LOCAL_WORLD_SIZE=$per_host" \
      "MASTER_ADDR=${addresses[0]}" MASTER_PORT=29500 OMP_NUM_THREADS=1 \
      "$bin/network_world" "$3" "$4" "$2" >"$work/$rank" 2>&1 &
    ranks[rank]=$!
  done
}
# Waits until every rank has trained that many steps.
await_step() { # STEP
  local rank
  for rank in "${!ranks[@]}"; do
    timeout 60 grep -q "^step $1$" <(exec tail -n +1 -s 0.05 -f --pid="${ranks[rank]}" "$work/$rank") ||
      return
  done
}
# Waits until all ranks have ended, or fails when the time is over.
await_end() { # SECONDS
  local rank until=$((SECONDS + $1))
  for rank in "${!ranks[@]}"; do
    timeout "$((until > SECONDS ? until - SECONDS : 1))" \
      tail -s 0.05 -f --pid="${ranks[rank]}" /dev/null || return
  done
}

failures=0
row() { # FAULT RANKS OUTCOME
  printf '| %s | %s | %s |\n' "$@"
}
wrong() { # FAULT RANKS WHAT
  failures=$((failures + 1))
  row "$1" "$2" "FAILED: $3"
  tail -n 5 "$work"/[0-9] >&2
}
# The ranks of a case, with what they said.
said() { # PATTERN
  cat "$work"/[0-9] | sed -nE "s/$1/\1/p" | sort -nu
}

world() { # RANKS BACKEND
  echo "$1 ranks, ${2:-default backend}"
}

# Trains to the end through the fault, to the weights that a run without faults has.
survives() { # FAULT RANKS BACKEND SECONDS LEAST_MS COMMAND...
  local name=$1 reference=$work/weights_$2_$3 weights longest
  local -a case=("$name" "$(world "$2" "$3")")
  stop_ranks && remove_hosts && make_hosts || fail "cannot make namespaces"
  start "$2" "$3" "$steps" "$4"
  await_step 100 || { wrong "${case[@]}" "no rank trained" && return; }
  fault "${@:6}"
  await_end $(($4 + 60)) || { wrong "${case[@]}" "a rank still runs" && return; }
  weights=$(said '^weights ([0-9]+),.*')
  longest=$(said '^.*longest step ([0-9]+).* ms$' | tail -n 1)
  [[ -e $reference ]] || echo "$weights" >"$reference"
  if [[ -z $weights || $weights != "$(cat "$reference")" ]]; then
    wrong "${case[@]}" "expected the weights $(cat "$reference"), got ${weights:-none}"
  elif ((longest < $5)); then
    wrong "${case[@]}" "the longest step took $longest ms, so it met no fault"
  else
    row "${case[@]}" "trained on to the same weights; the longest step took $longest ms"
  fi
}

# Each rank but those lost throws in time, and names those that it cannot reach.
ends() { # FAULT RANKS BACKEND SECONDS TEXT_0 TEXT_1 COMMAND...: TEXT_N of host N, "" where it is lost
  local name=$1 rank text took=0 began
  local -a case=("$name" "$(world "$2" "$3"), timeout $4 s") texts=("$5" "$6")
  stop_ranks && remove_hosts && make_hosts || fail "cannot make namespaces"
  start "$2" "$3" 1000000 "$4"
  await_step 100 || { wrong "${case[@]}" "no rank trained" && return; }
  began=$(date +%s%N)
  fault "${@:7}"
  await_end $(($4 + beyond_timeout)) ||
    { wrong "${case[@]}" "a rank still runs after $(($4 + beyond_timeout)) s" && return; }
  took=$((($(date +%s%N) - began) / 1000000))
  for rank in "${!ranks[@]}"; do
    text=${texts[rank * 2 / $2]}
    [[ -z $text ]] || grep -qE "^learned after .*backward pass.*$text" "$work/$rank" || {
      wrong "${case[@]}" "rank $rank did not say \"$text\"" && return
    }
  done
  row "${case[@]}" "all ranks left within $took ms: \"${texts[0]:-${texts[1]}}\""
}

# What the ranks say where they cannot meet.
no_way_to_meet() { # SECONDS
  local -a case=("packets dropped from the start" "2 ranks, gloo, timeout $1 s")
  stop_ranks && remove_hosts && make_hosts || fail "cannot make namespaces"
  fault drop 0 1
  start 2 gloo 100 "$1"
  await_end $(($1 + beyond_timeout)) || { wrong "${case[@]}" "a rank still runs" && return; }
  grep -q "^refused.*expected all 2 ranks within $1000 ms, but rank 1 did not come" "$work/0" &&
    grep -q "^refused.*expected rank 0 to answer at ${addresses[0]} port 29500 within" "$work/1" ||
    { wrong "${case[@]}" "the ranks say otherwise" && return; }
  row "${case[@]}" "\"rank 1 did not come\", and \"expected rank 0 to answer at ${addresses[0]}\""
}

# How long after the group's timeout a rank has left at the latest, see docs/network.md.
beyond_timeout=12
steps=5000 # more than the seconds until the fault take

make_hosts 2>"$work/problem" || skip "cannot make network namespaces: $(head -n 1 "$work/problem")"
row fault ranks outcome
row --- --- ---
survives "none" 2 gloo 30 0 true
survives "link down for 2 s" 2 gloo 30 1500 cut_for 2
if [[ $short == yes ]]; then
  ends "host 0, with the store, vanishes" 2 gloo 10 \
    "" "rank 0 of 2 cannot be reached" vanish 0
  exit $((failures > 0))
fi

survives "packets dropped for 2 s" 2 gloo 30 1500 drop_for 2
survives "1 Mbit/s for 5 s" 2 gloo 30 100 slow_down_for 5
survives "none" 4 "" 30 0 true
survives "link down for 2 s" 4 "" 30 1500 cut_for 2
survives "packets dropped for 60 s" 2 gloo 150 60000 drop_for 60
no_way_to_meet 5
ends "link down for 60 s" 2 gloo 20 \
  "rank 1 of 2 cannot be reached" "rank 0 of 2 cannot be reached" cut
ends "packets dropped for good, both ways" 2 gloo 10 \
  "rank 1 of 2 cannot be reached" "rank 0 of 2 cannot be reached" drop 0 1
ends "packets dropped for good, of host 0" 2 gloo 10 \
  "rank 1 of 2 cannot be reached" "rank 0 of 2 cannot be reached" drop 0
ends "packets dropped for good, of host 1" 2 gloo 10 \
  "rank 1 of 2 cannot be reached" "rank 0 of 2 cannot be reached" drop 1
ends "host 0, with the store, vanishes" 2 gloo 10 "" "rank 0 of 2 cannot be reached" vanish 0
ends "host 1 vanishes" 2 gloo 10 "rank 1 of 2 cannot be reached" "" vanish 1
ends "host 0, with the store, vanishes" 4 "" 10 "" "ranks 0, 1 of 4 cannot be reached" vanish 0
ends "host 1 vanishes" 4 "" 10 "ranks 2, 3 of 4 cannot be reached" "" vanish 1
exit $((failures > 0))
