#!/usr/bin/env bash
# Measures ddp_bench over a link of a given rate: see usage() below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
usage: scripts/bench_link.sh [--quick] [--short] [--hooks] [--diloco] [--pipeline] [--models A,B,...]
                             [--bin FOLDER] [--python PROGRAM] [--results FOLDER] [--output FOLDER]
                             [RATE...]

Runs one rank of ddp_bench, and of its peer in Python, in each of two network namespaces that a
link of RATE Gbit/s joins (default: 1 and 10), and writes RESULTS.md. Needs root, ip and tc. The
namespaces and all that runs in them are gone when it ends, but by SIGKILL.

  --quick             fewer steps and bucket sizes
  --short             what bench_growth.sh asks for: C++ only, the fewest modes, bucket sizes and
                      steps that say which size is best, the all-reduce alone; no RESULTS.md
  --hooks             a step with each communication hook instead, shown; no RESULTS.md
  --diloco            a step of two regions that train by DiLoCo instead, shown beside one that sends
                      nothing; no RESULTS.md
  --pipeline          a pipeline of two stages by each schedule instead, shown beside the longer of
                      computation with the schedule's bubble and the wire, and beside what the
                      schedule's list allows with such messages; no RESULTS.md
  --models A,B,...    of ddp_bench; default: mlp,resnet18
  --bin FOLDER        with ddp_bench; builds nothing then
  --python PROGRAM    with torch; default: the one of scripts/python_with_torch.sh, "" for no peers
  --results FOLDER    for what is measured; what lies there of other rates and models, and of bench.sh,
                      goes into RESULTS.md as well. Default: build/release/bench, with --quick
                      build/release/bench_quick
  --output FOLDER     for RESULTS.md and plots/; default: benchmarks, with --quick that of --results
END
}

say() { echo "bench_link: $*"; }
fail() {
  echo "bench_link: $*" >&2
  exit 1
}

quick=no short=no hooks=no diloco=no pipeline=no models=mlp,resnet18 bin="" python=find
results="" output="" rates=()
while (($# > 0)); do
  case $1 in
    --quick) quick=yes ;;
    --short) short=yes python="" ;;
    --hooks) hooks=yes python="" ;;
    --diloco) diloco=yes python="" ;;
    --pipeline) pipeline=yes python="" ;;
    --models | --bin | --python | --results | --output)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --help | -h)
      usage
      exit
      ;;
    *)
      [[ $1 =~ ^[1-9][0-9]*(\.[0-9]+)?$|^0\.[0-9]*[1-9]$ ]] || {
        usage >&2
        fail "expected a rate in Gbit/s, got '$1'"
      }
      rates+=("$1")
      ;;
  esac
  shift
done
((${#rates[@]} > 0)) || rates=(1 10)
if [[ $quick == yes ]]; then
  results=${results:-$root/build/release/bench_quick} output=${output:-$results}
else
  results=${results:-$root/build/release/bench} output=${output:-$root/benchmarks}
fi

(($(id -u) == 0)) || fail "needs root, to make network namespaces"
for program in ip tc; do
  command -v "$program" >/dev/null || fail "needs $program (Debian's package iproute2)"
done
if [[ -z $bin ]]; then
  if [[ $hooks$diloco == *yes* ]]; then
    "$root/scripts/build.sh" micro
  elif [[ $pipeline == yes ]]; then
    "$root/scripts/build.sh" ddp_bench pipeline_bound
  else
    "$root/scripts/build.sh" ddp_bench costs
  fi
  bin=$root/build/release/bin
fi
[[ -x $bin/ddp_bench || $hooks$diloco == *yes* ]] || fail "expected ddp_bench in $bin"
[[ -x $bin/costs || $short == no ]] || fail "expected costs in $bin"
if [[ $python == find ]]; then
  python=$("$root/scripts/python_with_torch.sh") || python=""
fi
[[ -n $python || $short$hooks$diloco$pipeline == *yes* ]] || say "no Python with torch, so there will be no peers in the results"

spaces=("ddp_bench_$$_0" "ddp_bench_$$_1")
addresses=(10.213.0.1 10.213.0.2)
running=()

stop_running() {
  ((${#running[@]} == 0)) || kill -KILL "${running[@]}" 2>/dev/null || true
  running=()
}
clean_up() {
  stop_running
  wait
  local left
  for space in "${spaces[@]}"; do
    left=$(ip netns pids "$space" 2>/dev/null) || true # what the programs have started
    [[ -z $left ]] || kill -KILL $left 2>/dev/null || true
    ip netns del "$space" 2>/dev/null || true # its end of the link goes with it
  done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

make_link() {
  local side
  for side in 0 1; do
    ip netns add "${spaces[side]}"
  done
  ip link add link0 netns "${spaces[0]}" type veth peer name link1 netns "${spaces[1]}"
  for side in 0 1; do
    ip -n "${spaces[side]}" address add "${addresses[side]}/24" dev "link$side"
    ip -n "${spaces[side]}" link set lo up
    ip -n "${spaces[side]}" link set "link$side" up
  done
}

# A burst has to hold what the kernel hands over at once (64 KB), and what the rate lets through
# between two looks at the clock; what is more would let messages travel faster than the link.
shape_link() { # RATE
  local side burst
  burst=$(awk -v rate="$1" 'BEGIN { print int(rate < 2 ? 256 : rate * 128) }')
  for side in 0 1; do
    tc -n "${spaces[side]}" qdisc replace dev "link$side" root \
      tbf rate "$(awk -v rate="$1" 'BEGIN { printf "%d", rate * 1000 }')mbit" \
      burst "${burst}kb" latency 50ms
  done
}

# Runs one command on each side and ends both when one fails. The numbers are those of the programs
# themselves: in the background the shell becomes ip, and ip the program.
together() { # COMMAND_OF_0 -- COMMAND_OF_1
  local first=() status=0
  while [[ $1 != -- ]]; do
    first+=("$1")
    shift
  done
  shift
  ip netns exec "${spaces[0]}" "${first[@]}" &
  running=($!)
  ip netns exec "${spaces[1]}" "$@" >&2 &
  running+=($!)
  local started=("${running[@]}") program
  wait -n "${started[@]}" || {
    status=$?
    stop_running
  }
  for program in "${started[@]}"; do
    wait "$program" || status=$((status ? status : $?))
  done
  running=()
  return "$status"
}

# The payload that one connection gets through; 96% of the rate of the frames at best.
check_rate() { # RATE FOLDER
  local measured share
  measured=$(together python3 "$root/benchmarks/peers/link_rate.py" receive 29400 -- \
    python3 "$root/benchmarks/peers/link_rate.py" send "${addresses[0]}" 29400 2)
  share=$(awk -v got="$measured" -v rate="$1" 'BEGIN { printf "%d", 100 * got / rate }')
  ((share <= 102)) || fail "the link of $1 Gbit/s carries $measured: it is not held to its rate"
  echo "One TCP connection carries $measured Gbit/s over it." >"$2/rate.txt"
  if ((share < 85)); then
    echo "That is less than its rate: this machine is slower than the link." >>"$2/rate.txt"
  fi
  say "$(cat "$2/rate.txt")"
}

# A rank's environment. Gloo is told which interface to use: the host's name may lead elsewhere. That
# no name service answers in a namespace, c10d says in a warning.
rank() { # SIDE COMMAND...
  command=(env "RANK=$1" WORLD_SIZE=2 "LOCAL_RANK=0" LOCAL_WORLD_SIZE=1
    "MASTER_ADDR=${addresses[0]}" MASTER_PORT=29500 "GLOO_SOCKET_IFNAME=link$1"
    OMP_NUM_THREADS=1 "${@:2}")
}
run_ranks() { # FILE COMMAND...
  local first command
  rank 0 "${@:2}"
  first=("${command[@]}")
  rank 1 "${@:2}"
  together "${first[@]}" -- "${command[@]}" >"$1"
}

# As on two hosts. The default would choose Gloo as well, for ranks in two networks.
run_cpp() { # FOLDER MODEL PASS ARGUMENTS...
  say "${1##*/}, $2, C++, $3"
  run_ranks "$1/$2-$3-cpp.jsonl" "$bin/ddp_bench" --backend gloo --model "$2" "${@:4}"
}
run_python() { # FOLDER MODEL PASS ARGUMENTS...
  [[ -n $python ]] || return 0
  say "${1##*/}, $2, Python, $3"
  run_ranks "$1/$2-$3-py.jsonl" "$python" "$root/benchmarks/peers/ddp_peer.py" --model "$2" "${@:4}"
}

measure() { # FOLDER MODEL
  local steps=(--iters 3 --rounds 5) sweep=1,5,10,25,50
  [[ $quick == no ]] || steps=(--iters 2 --rounds 2) sweep=10
  run_cpp "$1" "$2" 1 --modes none,flat,c10d,ddp,ddp_view,ddp_step,ddp_tuned "${steps[@]}"
  run_python "$1" "$2" 1 --modes none,py_ddp "${steps[@]}"
  run_python "$1" "$2" 2 --modes none,py_ddp "${steps[@]}"
  run_cpp "$1" "$2" 2 --modes none,flat,c10d,ddp,ddp_view,ddp_step,ddp_tuned "${steps[@]}"
  run_cpp "$1" "$2" sweep --modes none,c10d,ddp,ddp_tuned --sweep "$sweep" "${steps[@]}"
  run_python "$1" "$2" sweep --modes none,py_ddp --sweep "$sweep" "${steps[@]}"
}

# Over a slow link a step takes seconds, and nearly all of them the wire's: few steps are enough, and
# ddp_tuned, which needs more of them, runs alone.
measure_short() { # FOLDER MODEL RATE
  local steps=(--iters 2 --rounds 4) sweep=1,5,10,25
  if awk -v rate="$3" 'BEGIN { exit !(rate < 0.5) }' || [[ $quick == yes ]]; then
    steps=(--iters 2 --rounds 1) sweep=1,10,25
    run_cpp "$1" "$2" sweep --modes none,ddp --sweep "$sweep" "${steps[@]}" --warmup 3
    run_cpp "$1" "$2" tuned --modes none,ddp_tuned "${steps[@]}"
    return
  fi
  run_cpp "$1" "$2" steps --modes none,flat,c10d,ddp,ddp_tuned "${steps[@]}"
  run_cpp "$1" "$2" sweep --modes none,flat,ddp,ddp_tuned --sweep "$sweep" "${steps[@]}"
}
# Between 4 KiB, for the latency, and 1 MiB most of a message is the shaper's burst, not the link.
measure_all_reduce() { # FOLDER
  local sizes=4096,1048576,4194304,16777216
  [[ $quick == no ]] || sizes=4096,1048576,4194304
  say "${1##*/}, the all-reduce alone"
  mkdir -p "$1/all_reduce"
  run_ranks "$1/all_reduce/gloo.jsonl" \
    "$bin/costs" all_reduce --backend gloo --no-copies --sizes "$sizes"
}

# Messages that take nothing, half a forward and a whole one over 1 Gbit/s; and layers that compute,
# whose messages have 1024 KiB.
measure_pipeline() { # FOLDER RATE
  local schedule kib sleep steps=(--iters 2 --rounds 4) schedules=(1f1b eager gpipe interleaved)
  [[ $quick == no ]] || steps=(--iters 1 --rounds 2) schedules=(1f1b)
  for schedule in "${schedules[@]}"; do
    for kib in 1024 1 1200 2400; do
      sleep=(--sleep --message-kib "$kib")
      ((kib != 1024)) || sleep=()
      run_ranks "$1/pipeline-$schedule-$kib.jsonl" "$bin/ddp_bench" --backend gloo --pp \
        --schedule "$schedule" "${sleep[@]}" "${steps[@]}"
      python3 "$root/benchmarks/report/pipeline_over_link.py" \
        "$1/pipeline-$schedule-$kib.jsonl" "$kib" "$2" "$bin/pipeline_bound"
    done
  done
}

IFS=, read -ra models <<<"$models"
make_link
for rate in "${rates[@]}"; do
  folder=$results/link_$rate
  mkdir -p "$folder"
  shape_link "$rate"
  check_rate "$rate" "$folder"
  if [[ $hooks == yes ]]; then
    run_ranks "$folder/hooks.txt" "$bin/micro" hooks --backend gloo
    cat "$folder/hooks.txt"
    continue
  fi
  if [[ $diloco == yes ]]; then
    rounds=(--rounds 7) # steps vary by more than an exchange takes
    [[ $quick == no ]] || rounds=(--rounds 1 --sync-every 100)
    run_ranks "$folder/diloco.txt" "$bin/micro" diloco "${rounds[@]}"
    cat "$folder/diloco.txt"
    continue
  fi
  if [[ $pipeline == yes ]]; then
    measure_pipeline "$folder" "$rate"
    continue
  fi
  [[ $short == no ]] || measure_all_reduce "$folder"
  for model in "${models[@]}"; do
    rm -f "$folder/$model"-*.jsonl
    if [[ $short == yes ]]; then
      measure_short "$folder" "$model" "$rate"
    else
      measure "$folder" "$model"
    fi
  done
done
[[ $short$hooks$diloco$pipeline != *yes* ]] || exit 0
python3 "$root/benchmarks/report/report.py" "$results" "$output"
say "wrote $output/RESULTS.md"
