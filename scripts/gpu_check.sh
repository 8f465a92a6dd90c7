#!/usr/bin/env bash
# Builds and runs everything that needs a GPU, and writes one report: see usage() below.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END'
usage: scripts/gpu_check.sh [--output FOLDER] [--build FOLDER] [--no-build] [--headers FOLDER]
                            [--python PROGRAM] [--jobs N] [--together N] [--seconds N]
                            [-- CMAKE ARGUMENTS...]
       scripts/gpu_check.sh --collect FOLDER

On a machine with one NVIDIA GPU: builds what is needed, with the LibTorch of a Python's torch; runs
two ranks over NCCL that share the GPU, their failures, and the tests that need a GPU, under
compute-sanitizer too; and times ddp_bench beside Python's DistributedDataParallel. Values come before
speed; what is timed runs alone. Each part has a limit. Goes on after a failure, ends within --seconds, and says in the report,
failures first, what it left out. Without a GPU it does the same, and skips what needs one.

  --output FOLDER   for gpu_check.md and gpu_check_logs.tar.gz; default: build/gpu_check
  --build FOLDER    default: build/gpu
  --no-build        takes the programs that are in the build folder
  --headers FOLDER  of Catch2 and CLI11, as --collect made it; default: build/gpu_headers where it
                    is there, else those that CMake finds
  --python PROGRAM  with torch; default: python3, else that of scripts/python_with_torch.sh
  --jobs N          compilations at a time; default: one a core
  --together N      tests and pairs of ranks at a time; default: 6
  --seconds N       for all of it; default: 570
  --collect FOLDER  copies the headers of Catch2 (2.13) and CLI11 of this machine there, for one that
                    cannot install them

Exit code: 0; 1 when a part failed, or a target of the step time was missed; 2 bad usage.

For a machine without a network: --collect build/gpu_headers here, and take that folder along with
the sources. It needs CMake, Ninja, a compiler, the CUDA toolkit and Python with torch 2.11.
END
}

fail() {
  echo "gpu_check: $*" >&2
  exit 2
}

# The folders of headers, with what CMake's find_package() looks for.
collect() { # FOLDER
  local include
  for include in /usr/include /usr/local/include; do
    [[ -f $include/catch2/catch.hpp && -f $include/CLI/CLI.hpp ]] || continue
    mkdir -p "$1/include/catch2" "$1/include/CLI" "$1/cmake"
    cp "$include"/catch2/catch.hpp "$1/include/catch2"
    cp -r "$include"/CLI/. "$1/include/CLI"
    printf '#define CATCH_CONFIG_MAIN\n#include <catch2/catch.hpp>\n' >"$1/cmake/catch_main.cpp"
    cat >"$1/cmake/Catch2Config.cmake" <<'END'
if(NOT TARGET Catch2WithMain)
  add_library(Catch2WithMain STATIC ${CMAKE_CURRENT_LIST_DIR}/catch_main.cpp)
  target_include_directories(Catch2WithMain SYSTEM PUBLIC ${CMAKE_CURRENT_LIST_DIR}/../include)
  target_compile_definitions(Catch2WithMain PUBLIC DDP_CATCH2_V2)  # the compiler may find v3, too
  add_library(Catch2::Catch2WithMain ALIAS Catch2WithMain)
endif()
END
    cat >"$1/cmake/CLI11Config.cmake" <<'END'
if(NOT TARGET CLI11::CLI11)
  add_library(CLI11::CLI11 INTERFACE IMPORTED GLOBAL)
  target_include_directories(CLI11::CLI11 INTERFACE ${CMAKE_CURRENT_LIST_DIR}/../include)
endif()
END
    echo "gpu_check: headers of Catch2 and CLI11 are in $1"
    return
  done
  fail "--collect: expected catch2/catch.hpp and CLI/CLI.hpp in /usr/include, found none. Install them."
}

# Starts a command as two ranks on one GPU. NCCL refuses that for ranks of one host, which
# NCCL_HOSTID tells apart; they then talk over sockets. Ends with the status of a rank that failed; of
# rank JUDGED alone, where that is set.
write_pair() { # FILE
  cat >"$1" <<'END'
#!/usr/bin/env bash
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 CUDA_VISIBLE_DEVICES=0
export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
export MASTER_PORT=$((20000 + RANDOM % 10000))
DDP_SECOND_STORE=$(mktemp -u)
export DDP_SECOND_STORE
pids=()
for rank in 0 1; do
  RANK=$rank NCCL_HOSTID=rank$rank "$@" &
  pids+=($!)
done
trap 'kill -9 "${pids[@]}" 2>/dev/null; rm -f "$DDP_SECOND_STORE"' EXIT
trap 'exit 143' TERM INT
worst=0
for rank in 0 1; do
  wait "${pids[rank]}"
  status=$?
  ((status == 0)) && continue
  echo "rank $rank ended with status $status"
  [[ ${JUDGED:-$rank} == "$rank" ]] && worst=$status
done
exit "$worst"
END
  chmod +x "$1"
}

output=$root/build/gpu_check build=$root/build/gpu headers="" python="" jobs=$(nproc) together=6 seconds=570
builds=yes cmake_arguments=()
while (($# > 0)); do
  case $1 in
    --output | --build | --headers | --python | --jobs | --together | --seconds)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --no-build) builds=no ;;
    --collect)
      (($# > 1)) || fail "$1 needs a folder"
      collect "$2"
      exit
      ;;
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
[[ -n $headers || ! -d $root/build/gpu_headers ]] || headers=$root/build/gpu_headers
if [[ -n $headers ]]; then
  [[ -d $headers/cmake ]] || fail "--headers: expected a folder that --collect made, got '$headers'"
  headers=$(cd "$headers" && pwd)
fi
logs=$(mktemp -d)
mkdir "$logs/steps" "$logs/rows"
pair=$logs/pair.sh
write_pair "$pair"
export OMP_NUM_THREADS=1

has_torch() { "$1" -c 'import torch.nn.parallel' >/dev/null 2>&1; }
if [[ -z $python ]]; then
  python=python3
  has_torch python3 || python=$("$root/scripts/python_with_torch.sh" 2>/dev/null)
elif ! has_torch "$python"; then
  fail "--python: expected one that has torch, got '$python'"
fi
has_gpu=no
timeout 60 "${python:-false}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null &&
  has_gpu=yes

targets="step time within its targets"
# A part is a line of the report's table: its name, what became of it, how long it took, and why.
# Each lies in a file of its own, for those that run in a shell of their own.
row=100
note() { # NAME RESULT SECONDS WHY
  printf '| %s | %s | %s | %s |\n' "$@" >"$logs/rows/$row"
  row=$((row + 1))
  echo "gpu_check: $1: $2${4:+ ($4)}, $3 s"
}
failed() { grep -hs '^| [^|]* | failed |' "$logs"/rows/*; }

# Runs a part in a shell of its own, so many at a time.
beside() { # FUNCTION ARGUMENTS...
  while (($(jobs -pr | wc -l) >= together)); do wait -n; done
  (
    trap '[[ -z ${child-} ]] || kill "$child"; exit 1' TERM
    "$@"
  ) &
  row=$((row + 1))
}
log_of() { echo "$logs/${1//[^A-Za-z0-9_.-]/_}.log"; } # NAME
left() { echo $((seconds - SECONDS)); }
# What a log says of a failure, for a cell of the table: the first line that looks like it, else the
# last.
reason_in() { # LOG
  local line
  line=$(grep -m 1 -E '^Missed: |failed: |what\(\): |error: ' "$1" ||
    grep -m 1 -E 'FAILED|[Ee]rror|ERROR' "$1" ||
    grep -v '^ *$' "$1" | tail -n 1)
  line=${line:0:300}
  echo "${line//|//}"
}

# Runs a command with a bound, its output to a log. A part without time left is skipped, and so is
# one that says that it has no GPU to run on, or a tool that the GPU is not one for it.
part() { # NAME SECONDS COMMAND...
  local name=$1 bound=$2 began=$SECONDS log status took
  log=$(log_of "$name")
  if (($(left) < 5)); then
    note "$name" skipped 0 "no time was left"
    return 1
  fi
  (($(left) >= bound)) || bound=$(left)
  timeout -k 5 "$bound" "${@:3}" >"$log" 2>&1 &
  child=$! # in the background, so that a signal ends it at once
  wait "$child"
  status=$?
  child=""
  took=$((SECONDS - began))
  if grep -q 'Device not supported' "$log"; then
    note "$name" skipped "$took" "the tool says: device not supported"
  elif ((status == 124 || status == 137)); then
    note "$name" failed "$took" "ended after $bound s"
  elif ((status != 0)); then
    note "$name" failed "$took" "status $status: $(reason_in "$log")"
  elif grep -q 'skipped: no CUDA device' "$log"; then
    note "$name" skipped "$took" "no CUDA device"
  else
    note "$name" passed "$took" ""
  fi
  return "$status"
}
# The same, of programs that the build made.
programs() { # NAME SECONDS PROGRAMS COMMAND...; PROGRAMS are the names of those that it needs
  local program
  for program in $3; do
    [[ -x $bin/$program ]] && continue
    note "$1" skipped 0 "$program was not built"
    return 1
  done
  part "$1" "$2" "${@:4}"
}

first_targets=(ddprun ddp_cuda_world ddp_cuda_failures)
tests=(cuda_test comm_cuda_test cuda_stream_test cuda_graph_test cuda_profile_test)
build_all() {
  if [[ $builds == no ]]; then
    note build skipped 0 "--no-build"
    return
  fi
  local prefix
  prefix=$("${python:-false}" -c 'import torch; print(torch.utils.cmake_prefix_path)') || {
    note build failed 0 "no Python has torch: name one with --python"
    return
  }
  local configure=(cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release)
  configure+=("-DTorch_DIR=$prefix/Torch" -DDDP_WITH_CUDA=ON -DDDP_INSTALL=OFF)
  [[ -z $headers ]] || configure+=("-DCatch2_DIR=$headers/cmake" "-DCLI11_DIR=$headers/cmake")
  part configure 90 "${configure[@]}" "${cmake_arguments[@]}" || return
  local bound=$((seconds / 2))
  part "build of the ranks" "$bound" cmake --build "$build" --parallel "$jobs" \
    --target "${first_targets[@]}" -- -k 0
  # Beside the ranks. One source that does not compile shall not keep the rest from being built.
  beside part "build of the rest" "$bound" nice cmake --build "$build" --parallel "$jobs" \
    --target ddp_bench "${tests[@]}" -- -k 0
}

# Python first: where this fails, NCCL itself does.
run_python() {
  local name="NCCL, two ranks of a GPU, by Python"
  if [[ $has_gpu == no ]]; then
    note "$name" skipped 0 "no CUDA device"
    return
  fi
  part "$name" 60 "$pair" "$python" -c 'import torch, torch.distributed as dist
dist.init_process_group("nccl")
ones = torch.ones(1, device="cuda:0")
dist.all_reduce(ones)
assert ones.item() == 2, ones
print("NCCL", torch.cuda.nccl.version())
dist.destroy_process_group()'
}

run_ranks() {
  local name label="nccl, 2 of a GPU"
  NCCL_DEBUG=INFO beside programs "$label: averages" 60 ddp_cuda_world \
    "$pair" "$bin/ddp_cuda_world" nccl averages
  beside programs "$label: parts" 60 ddp_cuda_world "$pair" "$bin/ddp_cuda_world" nccl parts
  beside programs "$label: models" 60 ddp_cuda_world "$pair" "$bin/ddp_cuda_world" nccl models
  beside programs "$label: timeout" 90 ddp_cuda_failures "$pair" "$bin/ddp_cuda_failures" timeout
  JUDGED=0 beside programs "$label: killed" 60 ddp_cuda_failures \
    "$pair" "$bin/ddp_cuda_failures" killed
  for name in connects split polls messages dropped captured settle leaves sparse units barrier throws \
    two_groups connects_alone; do
    beside programs "$label: $name" 60 ddp_cuda_failures "$pair" "$bin/ddp_cuda_failures" "$name"
  done
  wait
}

run_tests() {
  local name world ranks backend cases
  for name in "${tests[@]}"; do beside programs "$name" 100 "$name" "$bin/$name"; done
  for world in "1 nccl averages" "2 gloo averages" "4 gloo averages" "2 gloo parts" "2 gloo models"; do
    read -r ranks backend cases <<<"$world"
    beside programs "$backend, $ranks of a GPU: $cases" 60 "ddprun ddp_cuda_world" \
      "$bin/ddprun" -n "$ranks" "$bin/ddp_cuda_world" "$backend" "$cases"
  done
  wait
}

# Both languages, one after the other, in a process of one rank each.
time_steps() { # MODEL DTYPE BATCH ROUNDS
  local label="$1, $2, batch x $3" options launch=("$bin/ddprun" -n 1 --no-prefix)
  options=(--model "$1" --dtype "$2" --batch "$3" --backend nccl --iters 10 --rounds "$4")
  if [[ $has_gpu == no ]]; then
    note "$label" skipped 0 "no CUDA device"
    return
  fi
  programs "$label" 60 "ddprun ddp_bench" "${launch[@]}" "$bin/ddp_bench" \
    --modes none,c10d,ddp,ddp_view "${options[@]}"
  keep_lines "$label" "$label-cpp"
  programs "$label, Python" 60 ddprun "${launch[@]}" "$python" \
    "$root/benchmarks/peers/ddp_peer.py" --modes none,py_ddp,py_ddp_view "${options[@]}"
  keep_lines "$label, Python" "$label-py"
}
# Also of one whose modes ended with different parameters: that says so in the table of parts.
keep_lines() { # NAME FILE
  local lines
  lines=$(grep '^{' "$(log_of "$1")" 2>/dev/null) || return
  echo "$lines" >"$logs/steps/$2.jsonl"
}
run_benchmark() {
  time_steps small_params float32 1 6
  time_steps resnet18 float32 1 12
  time_steps transformer bfloat16 1 16
  time_steps transformer bfloat16 16 16
  [[ -n $(ls "$logs/steps") ]] || return
  part "$targets" 30 python3 "$root/benchmarks/report/gpu_report.py" "$logs/steps"
}

# Twice: with each tensor in memory of its own, so that a use outside of it or past its end shows;
# and with the driver's stream-ordered memory, of which the tool sees a use that does not wait for
# another stream.
run_sanitizer() {
  local tool
  tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  local check=("$tool" --tool memcheck --error-exitcode 86 --report-api-errors no)
  local memory="compute-sanitizer, memory" streams="compute-sanitizer, order of streams"
  local why=""
  [[ -n $tool ]] || why="compute-sanitizer was not found"
  [[ $has_gpu == yes ]] || why="no CUDA device"
  if [[ -n $why ]]; then
    note "$memory" skipped 0 "$why"
    note "$streams" skipped 0 "$why"
    return
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 beside programs "$memory" 120 cuda_stream_test \
    "${check[@]}" "$bin/cuda_stream_test" "[streams]"
  PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync beside programs "$streams" 120 cuda_stream_test \
    "${check[@]}" --track-stream-ordered-races all "$bin/cuda_stream_test" "[streams]"
  wait
}

describe_machine() {
  local cpu gpu
  cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
  gpu=$(timeout 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null |
    head -n 1)
  echo "Machine: $(nproc --all) x ${cpu:-unknown processor}, Linux $(uname -r)." \
    "GPU (memory, driver): ${gpu:-none}."
  echo "$("${python:-false}" -c 'import torch; n = getattr(torch.cuda, "nccl", None)
print(f"torch {torch.__version__}, CUDA {torch.version.cuda},",
      "NCCL", ".".join(map(str, n.version())) if n else "none", end=", ")' 2>/dev/null)" \
    "nvcc $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')," \
    "$(c++ --version | head -n 1), $(cmake --version | head -n 1)." \
    "Sources: $(git -C "$root" describe --always --dirty 2>/dev/null || echo 'not a git checkout')."
}
write_report() {
  local name
  {
    printf '# GPU check\n\nOf `scripts/gpu_check.sh`, %s s.\n\n' "$SECONDS"
    echo "$machine"
    printf '\n%s of %s parts failed.\n' "$(failed | wc -l)" "$(ls "$logs/rows" | wc -l)"
    while read -r name; do
      [[ $name != "$targets" ]] || continue # it is what stands below
      printf '\n## %s: the end of its output\n\n```\n' "$name"
      tail -n 60 "$(log_of "$name")" 2>/dev/null | cut -c 1-400
      printf '```\n'
    done < <(failed | sed 's/^| \([^|]*\) |.*/\1/')
    printf '\n## Parts\n\n| part | result | s | why |\n| --- | --- | --- | --- |\n'
    cat "$logs"/rows/*
    if [[ -s $(log_of "$targets") ]]; then
      printf '\n'
      cat "$(log_of "$targets")"
    fi
  } >"$output/gpu_check.md"
  tar -C "$logs" -czf "$output/gpu_check_logs.tar.gz" .
}

machine=$(describe_machine)
trap 'write_report; rm -rf "$logs"' EXIT
trap '[[ -z ${child-} ]] || kill "$child"; kill $(jobs -p); exit 1' INT TERM
# The report is written after each part: when this script is ended from outside, it has all until then.
for step in run_python build_all run_ranks run_tests run_sanitizer run_benchmark; do
  "$step"
  write_report
done
echo "gpu_check: wrote $output/gpu_check.md; $(failed | wc -l) of $(ls "$logs/rows" | wc -l) parts failed"
[[ -z $(failed) ]]
