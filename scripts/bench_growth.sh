#!/usr/bin/env bash
# Measures how costs grow with bytes, parameters, ranks and slower links: see usage() below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
usage: scripts/bench_growth.sh [--quick] [--only A,B,...] [--rates A,B,...] [--models A,B,...]
                               [--bin FOLDER] [--python PROGRAM] [--results FOLDER]
                               [--output FOLDER]

Builds, measures, and writes GROWTH.md and its plots from what was measured now and before. Takes
half an hour on two cores, which should have nothing else to do; --quick takes two minutes.

  --quick             fewer sizes, ranks and steps: shows that all works
  --only A,B,...      some of these sections; default: all
                        collectives  an all-reduce by bytes, over shm, Gloo and Open MPI
                        parameters   a step by the number of parameters
                        ranks        a step by the number of ranks on this host
                        setup        making a group and wrapping a model, by the number of ranks
                        links        two hosts, by the link's rate (scripts/bench_link.sh; as root)
  --rates A,B,...     of links, in Gbit/s; default: 0.1,1,10, with --quick 1
  --models A,B,...    of links, of mlp and resnet18; default: both, with --quick mlp
  --bin FOLDER        with ddprun, ddp_bench, ddp_plan and costs; builds nothing then
  --python PROGRAM    with torch, for setup; default: the one of scripts/python_with_torch.sh, ""
                      for no peer
  --results FOLDER    for what is measured; a section replaces its own there. Default:
                      build/release/growth, with --quick build/release/growth_quick
  --output FOLDER     for GROWTH.md and plots/; default: benchmarks, with --quick that of --results
END
}

say() { echo "bench_growth: $*"; }
fail() {
  echo "bench_growth: $*" >&2
  exit 1
}

all_sections=collectives,parameters,ranks,setup,links
quick=no only=$all_sections rates="" models="" bin="" python=find results="" output=""
while (($# > 0)); do
  case $1 in
    --quick) quick=yes ;;
    --only | --rates | --models | --bin | --python | --results | --output)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --help | -h)
      usage
      exit
      ;;
    *) fail "unknown argument '$1'; --help says which there are" ;;
  esac
  shift
done

expect_among() { # OPTION KNOWN GIVEN
  local name names
  IFS=, read -ra names <<<"$3"
  ((${#names[@]} > 0)) || fail "$1: expected some of $2, got ''"
  for name in "${names[@]}"; do
    [[ ,$2, == *",$name,"* && -n $name ]] || fail "$1: expected some of $2, got '$name'"
  done
}
wanted() { [[ ,$only, == *",$1,"* ]]; }

if [[ $quick == yes ]]; then
  rates=${rates:-1} models=${models:-mlp}
  results=${results:-$root/build/release/growth_quick} output=${output:-$results}
else
  rates=${rates:-0.1,1,10} models=${models:-mlp,resnet18}
  results=${results:-$root/build/release/growth} output=${output:-$root/benchmarks}
fi
expect_among --only "$all_sections" "$only"
expect_among --models mlp,resnet18 "$models"
number='([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]*[1-9])'
[[ $rates =~ ^$number(,$number)*$ ]] || fail "--rates: expected rates in Gbit/s, got '$rates'"
if wanted links && (($(id -u) != 0)); then
  fail "links: needs root, to make network namespaces; --only leaves it out"
fi
[[ -n $output && -n $results ]] || fail "--results and --output: expected folders, got ''"
if [[ -z $bin ]]; then
  "$root/scripts/build.sh" growth
  bin=$root/build/release/bin
fi
[[ -d $bin ]] || fail "--bin: expected a folder, got '$bin'"
bin=$(cd "$bin" && pwd) # mpirun starts programs by their path
expect_programs() { # SECTION PROGRAM...
  local program
  for program in "${@:2}"; do
    [[ -x $bin/$program ]] || fail "$1: expected $program in $bin"
  done
}
export OMP_NUM_THREADS=1

run() { # FILE RANKS PROGRAM ARGUMENTS...
  say "${1#"$results/"}"
  "$bin/ddprun" -n "$2" --no-prefix "$bin/$3" "${@:4}" >"$1"
}
start_section() { # NAME
  rm -rf "${results:?}/$1"
  mkdir -p "$results/$1"
}

collectives_programs=(ddprun costs)
measure_collectives() {
  local folder=$results/collectives seconds=1 size=4096 most=268435456 step=4 sizes=()
  [[ $quick == no ]] || { seconds=0.05 most=4194304 step=32; }
  for (( ; size <= most; size *= step)); do sizes+=("$size"); done
  local list
  list=$(IFS=, && echo "${sizes[*]}")
  run "$folder/shm.jsonl" 2 costs all_reduce --backend shm --sizes "$list" --seconds "$seconds"
  run "$folder/gloo.jsonl" 2 costs all_reduce --backend gloo --no-copies --sizes "$list" \
    --seconds "$seconds"
  if [[ ! -x $bin/mpi_all_reduce ]] || ! command -v mpirun >/dev/null; then
    say "no Open MPI (Debian's libopenmpi-dev and openmpi-bin), so it is left out"
    return
  fi
  local as_root=()
  (($(id -u) != 0)) || as_root=(--allow-run-as-root)
  say "collectives/openmpi.jsonl"
  mpirun --version | sed -n 's/^mpirun (\(.*\)) \(.*\)/\1 \2/p' >"$folder/openmpi.txt"
  mpirun "${as_root[@]}" -n 2 --oversubscribe "$bin/mpi_all_reduce" "$seconds" \
    "${sizes[@]}" >"$folder/openmpi.jsonl"
}

parameters_programs=(ddprun costs)
measure_parameters() {
  local counts=10,30,100,300,1000,3000,10000 steps=40000
  [[ $quick == no ]] || counts=10,100,400 steps=2000
  run "$results/parameters/steps.jsonl" 2 costs parameters --counts "$counts" --steps "$steps"
}

ranks_programs=(ddprun ddp_bench)
measure_ranks() {
  local models=(mlp mnist small_params) worlds=(1 2 4 8) model ranks steps
  [[ $quick == no ]] || models=(mlp) worlds=(1 2 4)
  for model in "${models[@]}"; do
    steps=(--warmup 4 --iters 8 --rounds 5)
    [[ $model != mlp ]] || steps=(--warmup 4 --iters 3 --rounds 5)
    [[ $quick == no ]] || steps=(--warmup 3 --iters 1 --rounds 2)
    for ranks in "${worlds[@]}"; do
      run "$results/ranks/$model-$ranks-shm.jsonl" "$ranks" ddp_bench --model "$model" \
        --modes none,c10d,ddp "${steps[@]}"
      ((ranks > 1)) || continue
      run "$results/ranks/$model-$ranks-gloo.jsonl" "$ranks" ddp_bench --model "$model" \
        --modes none,c10d --backend gloo "${steps[@]}"
    done
  done
}

setup_programs=(costs)
measure_setup() {
  local with_peer=2,4,8,16 alone=32,64 spawned=(16 64 128 256) runs=3 ranks
  [[ $quick == no ]] || with_peer=2,4 alone=8 spawned=(4 8) runs=1
  if [[ $python == find ]]; then
    python=$("$root/scripts/python_with_torch.sh") || python=""
  fi
  [[ -n $python ]] || say "no Python with torch, so there will be no peer of setup"
  local setup=("$root/benchmarks/init_time.py" --json --bin "$bin" --runs "$runs")
  say "setup/few.jsonl"
  "${setup[@]}" --ranks "$with_peer" --python "$python" >"$results/setup/few.jsonl"
  say "setup/many.jsonl"
  "${setup[@]}" --ranks "$alone" --python "" >"$results/setup/many.jsonl"
  say "setup/spawned.jsonl"
  for ranks in "${spawned[@]}"; do
    "$bin/costs" init_time --spawn "$ranks" --runs "$runs"
  done >"$results/setup/spawned.jsonl"
}

links_programs=(ddp_bench ddp_plan costs)
measure_links() {
  local options=(--short --models "$models" --bin "$bin" --results "$results") list
  [[ $quick == no ]] || options+=(--quick)
  IFS=, read -ra list <<<"$rates"
  "$root/scripts/bench_link.sh" "${options[@]}" "${list[@]}"
}

describe_machine() {
  local cpu
  cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
  echo "Machine: $(nproc --all) x ${cpu:-unknown processor}, Linux $(uname -r)." \
    "$([[ $quick == no ]] || echo 'A quick run: few steps.')"
}

IFS=, read -ra sections <<<"$only"
for section in "${sections[@]}"; do
  programs="${section}_programs[@]"
  expect_programs "$section" "${!programs}"
done
mkdir -p "$results" "$output"
describe_machine >"$results/machine.txt"
nproc --all >"$results/cores.txt"
for section in "${sections[@]}"; do
  # Rates and models that are not measured now stay as they were.
  [[ $section == links ]] || start_section "$section"
  SECONDS=0
  "measure_$section"
  say "$section took $SECONDS s"
done
python3 "$root/benchmarks/report/growth.py" "$results" "$output" "$bin/ddp_plan"
say "wrote $output/GROWTH.md"
