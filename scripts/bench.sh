#!/usr/bin/env bash
# Measures ddp_bench beside Python's DistributedDataParallel: see usage() below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
usage: scripts/bench.sh [--quick] [--models A,B,...] [--passes N] [--bin FOLDER]
                        [--python PROGRAM] [--results FOLDER] [--output FOLDER]

Builds, times every mode of ddp_bench and of Python's DistributedDataParallel on two ranks, and the
reducer alone on one, measures the peak memory of some modes, and writes RESULTS.md and its plots.
Processes of C++ and Python take turns, in both orders. Takes an hour or two on two cores, which
should have nothing else to do; --quick takes minutes.

  --quick             fewer steps, models and bucket sizes: shows that all works
  --models A,B,...    of ddp_bench; default: all, with --quick all but transformer
  --passes N          processes of each kind and model, for all modes and again for each sweep of
                      bucket sizes; default: 4 and 2, with --quick 2 and 2
  --bin FOLDER        with ddprun, ddp_bench and costs; builds nothing then
  --python PROGRAM    with torch; default: the one of scripts/python_with_torch.sh, "" for no peers
  --results FOLDER    for what is measured; default: build/release/bench, with --quick
                      build/release/bench_quick
  --output FOLDER     for RESULTS.md and plots/; default: benchmarks, with --quick that of --results
END
}

fail() {
  echo "bench: $*" >&2
  exit 1
}

quick=no models="" passes="" bin="" python=find results="" output=""
while (($# > 0)); do
  case $1 in
    --quick) quick=yes ;;
    --models | --passes | --bin | --python | --results | --output)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
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

sweep_passes=${passes:-2} # a sweep takes longer than all modes
if [[ $quick == yes ]]; then
  models=${models:-mnist,mlp,small_params,resnet18} passes=${passes:-2} rounds=3
  sweep=1,5,25 sweep_models=mlp memory_models=mlp
  results=${results:-$root/build/release/bench_quick} output=${output:-$results}
else
  models=${models:-mnist,mlp,small_params,resnet18,transformer} passes=${passes:-4} rounds=5
  sweep=1,5,10,25,50,100 sweep_models=mlp,resnet18 memory_models=mlp,transformer
  results=${results:-$root/build/release/bench} output=${output:-$root/benchmarks}
fi
[[ $passes =~ ^[1-9][0-9]*$ ]] || fail "--passes: expected a number from 1 on, got '$passes'"
if [[ -z $bin ]]; then
  "$root/scripts/build.sh" ddprun ddp_bench costs
  bin=$root/build/release/bin
fi
if [[ $python == find ]]; then
  python=$("$root/scripts/python_with_torch.sh") || python=""
fi
[[ -n $python ]] || echo "bench: no Python with torch, so there will be no peers in the results" >&2
for program in ddprun ddp_bench costs; do
  [[ -x $bin/$program ]] || fail "expected $program in $bin"
done
export OMP_NUM_THREADS=1

# How many steps a mode gets in a turn, by how long they take. Short turns, so that what the machine
# does meanwhile meets all modes alike.
iters_of() { # MODEL
  local iters
  case $1 in
    resnet18) iters=3 ;;
    transformer | mlp) iters=6 ;;
    *) iters=10 ;;
  esac
  echo "$iters"
}

# One process of either kind; its lines go to a file of its own.
run_cpp() { # FOLDER MODEL PASS ARGUMENTS...
  echo "bench: $1, $2, C++, pass $3"
  "$bin/ddprun" -n 2 --no-prefix "$bin/ddp_bench" --model "$2" "${@:4}" \
    --iters "$(iters_of "$2")" --rounds "$rounds" >"$results/$1/$2-$3-cpp.jsonl"
}
run_python() { # FOLDER MODEL PASS ARGUMENTS...
  [[ -n $python ]] || return 0
  echo "bench: $1, $2, Python, pass $3"
  "$bin/ddprun" -n 2 --no-prefix "$python" "$root/benchmarks/peers/ddp_peer.py" --model "$2" \
    "${@:4}" --iters "$(iters_of "$2")" --rounds "$rounds" >"$results/$1/$2-$3-py.jsonl"
}
# Both kinds, in the other order in every other pass.
take_turns() { # FOLDER MODEL PASS CPP_MODES PYTHON_MODES ARGUMENTS...
  local cpp=(run_cpp "$1" "$2" "$3" --modes "$4" "${@:6}")
  local peer=(run_python "$1" "$2" "$3" --modes "$5" "${@:6}")
  if (($3 % 2 == 1)); then
    "${cpp[@]}"
    "${peer[@]}"
  else
    "${peer[@]}"
    "${cpp[@]}"
  fi
}

# A process for each mode, so that nothing of another one is in its memory. Enough steps to meet the
# short moment of a step in which the most is in use.
measure_memory() { # MODEL PASS
  local mode arguments=(--memory --model "$1" --iters 20)
  # glibc then gives blocks of 1 MiB and more back when they are freed, and luck has no part in it.
  local -x MALLOC_MMAP_THRESHOLD_=1048576
  echo "bench: memory, $1, pass $2"
  for mode in none c10d ddp ddp_view; do
    "$bin/ddprun" -n 2 --no-prefix "$bin/ddp_bench" "${arguments[@]}" --modes "$mode"
  done >"$results/memory/$1-$2-cpp.jsonl"
  [[ -n $python ]] || return 0
  for mode in none py_ddp py_ddp_view; do
    "$bin/ddprun" -n 2 --no-prefix "$python" "$root/benchmarks/peers/ddp_peer.py" \
      "${arguments[@]}" --modes "$mode"
  done >"$results/memory/$1-$2-py.jsonl"
}

describe_machine() {
  local cpu
  cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
  echo "Machine: $(nproc --all) x ${cpu:-unknown processor}, Linux $(uname -r)." \
    "Two ranks of one thread. $([[ $quick == no ]] || echo 'A quick run: few steps.')"
}

for part in steps overhead memory sweep loopback timeline; do
  rm -rf "${results:?}/$part"
  mkdir -p "$results/$part"
done
describe_machine >"$results/machine.txt"
all=none,naive,flat,c10d,ddp,ddp_view,ddp_unused,ddp_static,ddp_step,ddp_tuned
all_python=none,py_ddp,py_ddp_view,py_ddp_unused,py_ddp_static
IFS=, read -ra models <<<"$models"
IFS=, read -ra sweep_models <<<"$sweep_models"
IFS=, read -ra memory_models <<<"$memory_models"
for ((pass = 1; pass <= passes; ++pass)); do
  for model in "${models[@]}"; do
    take_turns steps "$model" "$pass" "$all" "$all_python"
  done
  echo "bench: overhead, pass $pass"
  "$bin/costs" reducer >"$results/overhead/$pass.txt"
done
for model in "${memory_models[@]}"; do
  [[ " ${models[*]} " == *" $model "* ]] || continue
  for ((pass = 1; pass <= passes; ++pass)); do measure_memory "$model" "$pass"; done
done
for model in "${sweep_models[@]}"; do
  [[ " ${models[*]} " == *" $model "* ]] || continue
  for ((pass = 1; pass <= sweep_passes; ++pass)); do
    take_turns sweep "$model" "$pass" none,c10d,ddp,ddp_tuned none,py_ddp --sweep "$sweep"
    run_cpp loopback "$model" "$pass" --modes none,c10d,ddp,ddp_tuned --sweep "$sweep" --backend gloo
  done
done
for model in "${models[@]}"; do
  "$bin/ddprun" -n 2 --no-prefix "$bin/ddp_bench" --model "$model" --modes ddp --iters 1 \
    --rounds 1 --timeline "$results/timeline/$model.json" >/dev/null
done
python3 "$root/benchmarks/report/report.py" "$results" "$output"
echo "bench: wrote $output/RESULTS.md"
