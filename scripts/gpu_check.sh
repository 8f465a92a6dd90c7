#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, and writes one report: see usage() below.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
child="" # the process of a part that runs

usage() {
  cat <<'END_OF_USAGE'
usage: scripts/gpu_check.sh [--output FOLDER] [--build FOLDER] [--no-build] [--headers FOLDER]
                            [--python PROGRAM] [--jobs N] [--together N] [--seconds N]
                            [-- CMAKE ARGUMENTS...]
       scripts/gpu_check.sh --collect FOLDER [--build FOLDER] [--no-build] ...

On a machine with one NVIDIA GPU: builds what is needed, with the LibTorch of a Python's torch; runs
two and four ranks over NCCL that share the GPU, their failures, and the tests that need a GPU, under
compute-sanitizer too; counts the CUDA calls of steps; and times ddp_bench beside Python's
DistributedDataParallel. Values come before speed; what is timed runs alone. Each part has a limit.
Goes on after a failure, ends within --seconds, and says in the report, failures first, what it left
out. Without a GPU it does the same, and skips what needs one.

  --output FOLDER   for gpu_check.md and gpu_check_results.tgz, which has the report, a folder of
                    results as benchmarks/gpu has them, and logs; default: build/gpu_check
  --build FOLDER    default: build/gpu
  --no-build        takes the programs of the build folder, also ones that --collect made; builds
                    others in build/gpu where those do not start
  --headers FOLDER  of Catch2 and CLI11, as --collect made it; default: build/gpu_headers where it
                    is there, else those that CMake finds
  --python PROGRAM  with torch; default: python3, else that of scripts/python_with_torch.sh
  --jobs N          compilations at a time; default: one a core
  --together N      tests and pairs of ranks at a time; default: 6
  --seconds N       for all of it; default: 530
  --collect FOLDER  copies the headers of Catch2 (2.13) and CLI11 of this machine there, builds the
                    programs (with --no-build: takes them), and packs them as programs.tar.xz

Exit code: 0; 1 when a part failed, a target of the step time was missed, or with a GPU a program is
missing; 2 bad usage.

For a machine without a network: --collect build/gpu_headers here, and take that folder along with
the sources. There, --no-build --build build/gpu_headers runs the programs, with the libraries of
--python's torch, which has to be the same version. It needs CMake, Ninja, a compiler and the CUDA
toolkit only where they do not start.
END_OF_USAGE
}

fail() {
  echo "gpu_check: $*" >&2
  exit 2
}

output=$root/build/gpu_check build=$root/build/gpu headers="" python="" jobs=$(nproc) together=6 seconds=530
builds=yes collect="" cmake_arguments=()
while (($# > 0)); do
  case $1 in
    --output | --build | --headers | --python | --jobs | --together | --seconds | --collect)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --no-build) builds=no ;;
    --)
      cmake_arguments=("${@:2}")
      break
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
for option in jobs together seconds; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] || fail "--$option: expected a number from 1 on, got '${!option}'"
done
mkdir -p "$output" "$build" || fail "expected folders that can be made, got '$output' and '$build'"
output=$(cd "$output" && pwd) build=$(cd "$build" && pwd) bin=$build/bin
[[ -n $headers || ! -d $root/build/gpu_headers/cmake ]] || headers=$root/build/gpu_headers
if [[ -n $headers ]]; then
  [[ -d $headers/cmake ]] || fail "--headers: expected a folder that --collect made, got '$headers'"
  headers=$(cd "$headers" && pwd)
fi

first_targets=(ddprun ddp_cuda_world ddp_cuda_failures ddp_elastic_kill)
tests=(cuda_test comm_cuda_test cuda_stream_test cuda_graph_test cuda_profile_test cuda_calls_test)
later_targets=(ddp_cuda_census ddp_bench "${tests[@]}")
all_programs=("${first_targets[@]}" "${later_targets[@]}")
carried_file=programs.tar.xz commit_file=commit.txt results_file=gpu_check_results.tgz
share=$root/scripts/gpu_check/share_gpu.sh
targets="step time within its targets"

# shellcheck source=scripts/gpu_check/parts.sh
source "$root/scripts/gpu_check/parts.sh"
# shellcheck source=scripts/gpu_check/build.sh
source "$root/scripts/gpu_check/build.sh"
# shellcheck source=scripts/gpu_check/collect.sh
source "$root/scripts/gpu_check/collect.sh"
# shellcheck source=scripts/gpu_check/ranks.sh
source "$root/scripts/gpu_check/ranks.sh"
# shellcheck source=scripts/gpu_check/measures.sh
source "$root/scripts/gpu_check/measures.sh"
# shellcheck source=scripts/gpu_check/report.sh
source "$root/scripts/gpu_check/report.sh"

logs=$(mktemp -d)
results=$logs/results
mkdir -p "$logs/rows" "$results/steps"
export OMP_NUM_THREADS=1

has_torch() { "$1" -c 'import torch.nn.parallel' >/dev/null 2>&1; }
if [[ -z $python ]]; then
  python=python3
  has_torch python3 || python=$("$root/scripts/python_with_torch.sh" 2>/dev/null)
elif ! has_torch "$python"; then
  fail "--python: expected one that has torch, got '$python'"
fi

if [[ -n $collect ]]; then
  trap 'rm -rf "$logs"' EXIT
  mkdir -p "$collect" || fail "--collect: expected a folder that can be made, got '$collect'"
  collect=$(cd "$collect" && pwd)
  collect_headers "$collect"
  seconds=3600 # it waits for nothing else
  [[ $builds == no ]] || build_programs "" || exit 1
  [[ -z $(failed) ]] || exit 1
  collect_programs "$collect"
  commit >"$collect/$commit_file"
  exit
fi

has_gpu=no
timeout 60 "${python:-false}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null &&
  has_gpu=yes
machine=$(describe_machine)
trap 'write_report; rm -rf "$logs"' EXIT
trap '[[ -z $child ]] || kill "$child"; kill $(jobs -p); exit 1' INT TERM
# Values first, then counts, then what others can be spared for; times last, for they take longest and
# say least of what is right. The report is written after each part: when this script is ended from
# outside, it has all until then.
for step in run_python build_all run_elastic run_two_ranks run_four_ranks run_census run_tests \
  run_memory run_modes run_times run_benchmark run_census_alone; do
  "$step"
  write_report
done
echo "gpu_check: wrote $output/gpu_check.md; $(failed | wc -l) of $(rows) parts failed," \
  "$(skipped | wc -l) were skipped"
[[ -z $(failed) ]]
