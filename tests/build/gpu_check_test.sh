#!/usr/bin/env bash
# Runs scripts/gpu_check.sh with stand-ins for a GPU and for the programs: one fails, one does not
# end.
# usage: gpu_check_test.sh REPOSITORY
set -Eeuo pipefail # the trap also in functions
root=$1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "FAILED: line $LINENO"' ERR
bin=$work/build/bin
mkdir -p "$bin"
stand_in() {
  cat >"$1"
  chmod +x "$1"
}
expect() { # TEXT FILE
  grep -qF -- "$1" "$2" || {
    echo "FAILED: expected '$1' in"
    cat "$2"
    exit 1
  }
}
expect_status() { # EXPECTED GOT
  [[ $1 == "$2" ]] || {
    echo "FAILED: expected status $1, got $2, and"
    cat "$work/output"
    exit 1
  }
}
check() { # ARGUMENTS...
  PATH="$work/tools:$PATH" "$root/scripts/gpu_check.sh" --no-build --build "$work/build" \
    --output "$work/out" --python "$work/python" "$@" >"$work/output" 2>&1
}

# Tools that this machine may have, or not.
mkdir "$work/tools"
printf '#!/bin/sh\nexit 0\n' | stand_in "$work/tools/compute-sanitizer"
printf '#!/bin/sh\necho "NVIDIA H200"\n' | stand_in "$work/tools/nvidia-smi"
printf '#!/bin/sh\necho "error: cmake was called"\nexit 3\n' | stand_in "$work/tools/cmake"

# Reports a GPU where the file "gpu" exists; also replaces Python's side of the benchmark.
stand_in "$work/python" <<END
#!/bin/sh
case \$2 in
  *is_available*) [ -f "$work/gpu" ] ;;
  *dirname*) echo "$work/site/torch/lib" ;;
  *cmake_prefix_path*) echo "$work" ;;
  --modes) cat "$work/python.jsonl" ;;
esac
END
stand_in "$bin/ddprun" <<'END'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do
  [ "$1" = -n ] && shift
  shift
done
exec "$@"
END
for program in cuda_graph_test cuda_profile_test cuda_calls_test; do
  printf '#!/bin/sh\necho ok\n' | stand_in "$bin/$program"
done
# Ranks that share a GPU, each of a host and of a port as NCCL wants it; over ddprun there are none.
stand_in "$bin/ddp_cuda_world" <<'END'
#!/bin/sh
echo "$WORLD_SIZE $NCCL_HOSTID $MASTER_PORT $1 $2 $DDP_DISABLE_COMM_MEM"
[ -z "$WORLD_SIZE" ] || [ "$NCCL_HOSTID$LOCAL_RANK" = "rank${RANK}0" ] || exit 2
END
stand_in "$bin/ddp_cuda_census" <<'END'
#!/bin/sh
[ "$RANK" != 0 ] || echo "{\"part\":\"$2\",\"name\":\"ddp\",\"by\":\"C++\",\"ranks\":$WORLD_SIZE}"
END
printf '#!/bin/sh\necho "skipped: no CUDA device"\n' | stand_in "$bin/cuda_test"
printf '#!/bin/sh\necho "failed: a | b"\nexit 3\n' | stand_in "$bin/comm_cuda_test"
# Two ranks: one is to be killed in one case, and aborts after a good log in another.
stand_in "$bin/ddp_cuda_failures" <<'END'
#!/bin/sh
[ "$WORLD_SIZE$NCCL_HOSTID" = "2rank$RANK" ] || exit 2
case $1$RANK in
  killed1) exit 137 ;;
  settle1) echo ok && exit 134 ;;
esac
echo ok
END
printf '#!/bin/sh\ncat "%s/cpp.jsonl"\n' "$work" | stand_in "$bin/ddp_bench"
# The two ranks of an elastic job, which end in a later generation where one was killed.
stand_in "$bin/ddp_elastic_kill" <<'END'
#!/bin/sh
[ "$NCCL_HOSTID$LOCAL_RANK$1" = slot0cpu:gloo,cuda:nccl ] || exit 2
[ "$3" = quiet ] || echo "ddprun: rank 1 was killed by signal 9 (SIGKILL); starting another one (1 of 10)"
[ "$3" = quiet ] && generation=1 || generation=2
hash=5e1f
[ "$2$3" != zerokilled ] || hash=0bad
for slot in 0 1; do
  echo "[$slot] slot $slot: the end at step 24 of generation $generation, on cuda:0, hash $hash"
done
END

# MODE RATIO: a line as ddp_bench prints it, of a step of 10 ms without the mode.
line() {
  echo "{\"model\":\"m\",\"mode\":\"$1\",\"step_ms\":$2,\"step_ms_p10\":$2,\"step_ms_p90\":$2," \
    "\"ratio\":$2,\"ratio_of_rounds\":[$2,$2,$2,$2,$2,$2],\"cpu_ms\":1,\"cpu_ratio\":1," \
    "\"cpu_ratio_of_rounds\":[1,1,1,1,1,1],\"compute_ms\":10,\"comm_ms\":1,\"overlap\":0}"
}
{ line none 1.0 && line ddp 1.02; } >"$work/cpp.jsonl"
{ line none 1.0 && line py_ddp 1.05; } >"$work/python.jsonl"

# The ranks' case that ends badly is a failure, and stands before the table of parts.
touch "$work/gpu"
status=0
check || status=$?
expect_status 1 $status
report=$work/out/gpu_check.md
grep -qE '^\| nccl, 2 of a GPU: killed \| passed ' "$report"
grep -qE '^\| nccl, 2 of a GPU: settle \| failed \| [0-9]+ \| status 134: ' "$report"
(($(grep -n '^## nccl, 2 of a GPU: settle' "$report" | cut -d: -f1) < $(grep -n '^## Parts' "$report" | cut -d: -f1))) || {
  echo "FAILED: expected failures before the parts"
  exit 1
}
# A few files come back of a run, all else in one; and names that go through any copy.
expect_files() { # FOLDER IN THE ARCHIVE
  [[ $(cd "$work/out" && echo *) == "gpu_check.md gpu_check_results.tgz" ]]
  rm -rf "$work/unpacked"
  mkdir "$work/unpacked"
  tar -C "$work/unpacked" -xzf "$work/out/gpu_check_results.tgz"
  results=$(echo "$work/unpacked/"*)
  [[ $results == "$work/unpacked/$1"-20* && -s $results/gpu_check.md && -s $results/machine.txt ]]
  [[ -z $(find "$results" -name '*[!A-Za-z0-9._-]*') ]]
}
expect_files nvidia-h200
log() { cat "$results/logs/$1.log"; }
grep -qE '^\| elastic, 2 of a GPU, killed in backward: adamw \| passed ' "$report"
grep -qE '^\| elastic, 2 of a GPU, killed in backward: zero \| failed \| [0-9]+ \| status 1: failed: expected the p' \
  "$report"
# Four ranks, of hosts of their own and of one port.
[[ $(log nccl__4_of_a_GPU__grids | cut -d ' ' -f 1,2,4,5 | sort | xargs) == \
  "4 rank0 nccl grids 4 rank1 nccl grids 4 rank2 nccl grids 4 rank3 nccl grids" ]]
[[ $(log nccl__4_of_a_GPU__grids | cut -d ' ' -f 3 | sort -u | wc -l) == 1 ]]
[[ $(log nccl__2_of_a_GPU__DDP_DISABLE_COMM_MEM_0 | cut -d ' ' -f 5- | sort -u) == "averages 0" ]]
# The results, as benchmarks/gpu has them.
expect '{"part":"census","name":"ddp","by":"C++","ranks":1}' "$results/census.jsonl"
expect '{"part":"memory","name":"ddp","by":"C++","ranks":2}' "$results/memory.jsonl"
expect '"mode":"ddp"' "$results/steps/resnet18-float32-x1-cpp.jsonl"
expect "after the times" "$results/clocks.txt"
# A part without its program has failed where there is a GPU.
expect "| cuda_stream_test | failed | 0 | cuda_stream_test was not built |" "$report"
expect "cuda_stream_test was not built: 3 parts lack it." "$report"
rm "$work/gpu" "$bin/ddp_cuda_failures"
sed -i 's/hash=0bad/hash=5e1f/' "$bin/ddp_elastic_kill"

# Without a GPU, and with a missing program, everything is skipped, which is no failure.
printf '#!/bin/sh\necho "skipped: no CUDA device"\n' >"$bin/comm_cuda_test"
check || expect_status 0 $?
grep -qE '^\| cuda_test \| skipped \| [0-9]+ \| no CUDA device \|' "$work/out/gpu_check.md"
expect "| cuda_stream_test | skipped | 0 | cuda_stream_test was not built |" "$work/out/gpu_check.md"
expect "| resnet18, float32, batch x 1 | skipped | 0 | no CUDA device |" "$work/out/gpu_check.md"
expect "| census, 2 of a GPU, Python | skipped | 0 | no CUDA device |" "$work/out/gpu_check.md"
expect_files no-gpu

# With a GPU: one fails and one does not end, and the programs after them run until the time is
# over.
touch "$work/gpu"
cp "$bin/cuda_graph_test" "$bin/ddp_cuda_failures"
printf '#!/bin/sh\necho "failed: a | b"\nexit 3\n' >"$bin/comm_cuda_test"
printf '#!/bin/sh\nexec sleep 600\n' | stand_in "$bin/cuda_stream_test"
report=$work/out/gpu_check.md
for seconds in 20 60 180; do
  status=0 began=$SECONDS
  check --together 1 --seconds $seconds || status=$?
  # On a busy machine the time may be over before that program begins.
  ! grep -q '^| cuda_stream_test | failed ' "$report" || break
done
expect_status 1 $status
((SECONDS - began < seconds + 40)) || {
  echo "FAILED: expected the end within $((seconds + 40)) s, took $((SECONDS - began)) s"
  exit 1
}
grep -qE '^\| comm_cuda_test \| failed \| [0-9]+ \| status 3: failed: a / b \|' "$report"
expect "## comm_cuda_test: the end of its output" "$report"
grep -qE '^\| cuda_stream_test \| failed \| [0-9]+ \| ended after [0-9]+ s \|' "$report"
expect "| resnet18, float32, batch x 1 | skipped | 0 | no time was left |" "$report"
expect "| transformer, bfloat16, batch x 16 | skipped | 0 | left out: it needs 60 s, and " "$report"
expect "| census, 1 of a GPU | skipped | 0 | left out: it needs 60 s, and " "$report"
expect "2 of " "$work/output"

# Targets: 2% over none, and 0.2 ms where Python adds 0.5; then more than half of what Python adds.
for program in cuda_stream_test comm_cuda_test; do cp "$bin/cuda_graph_test" "$bin/$program"; done
check || expect_status 0 $?
expect "| resnet18, float32, batch x 1 | 1.020 x none | 1.020 | met | 0.200 | 0.500 | met |" "$report"
expect "### transformer, bfloat16, batch x 16" "$report"
{ line none 1.0 && line ddp 1.04; } >"$work/cpp.jsonl"
status=0
check || status=$?
expect_status 1 $status
expect "| 1.040 x none | 1.040 | missed by 1.0% | 0.400 | 0.500 | missed |" "$report"
grep -qE '^\| step time within its targets \| failed \| [0-9]+ \| status 1: Missed: resnet18, float32,' "$report"

# Programs from elsewhere: a link stays one, and they start with the libraries of that Python's torch.
if [[ -f /usr/include/catch2/catch.hpp && -f /usr/include/CLI/CLI.hpp ]]; then
  mv "$bin/ddp_cuda_world" "$bin/test_worlds"
  ln -s test_worlds "$bin/ddp_cuda_world"
  rm "$bin/cuda_graph_test"
  status=0
  check --collect "$work/carried" || status=$?
  expect_status 2 $status
  expect "expected the program 'cuda_graph_test' in" "$work/output"
  cp "$bin/cuda_calls_test" "$bin/cuda_graph_test"
  check --collect "$work/carried" || expect_status 0 $?
  [[ -f $work/carried/include/catch2/catch.hpp && -f $work/carried/cmake/CLI11Config.cmake ]]
  # Packed only, as the folder travels with the sources; programs that were unpacked there are old.
  [[ -s $work/carried/commit.txt && ! -e $work/carried/bin ]]
  mkdir "$work/carried/bin"
  check --collect "$work/carried" || expect_status 0 $?
  [[ ! -e $work/carried/bin && -x $bin/ddprun ]]
  mkdir -p "$work/there" "$work/site/torch/lib" "$work/site/nvidia/cu13/lib"
  cp "$work/carried/programs.tar.xz" "$work/there"
  rm "$work/gpu"
  # An image without xz.
  printf '#!/bin/sh\nexit 127\n' | stand_in "$work/tools/xz"
  check --build "$work/there" || expect_status 0 $?
  rm "$work/tools/xz"
  [[ $(readlink "$work/there/bin/ddp_cuda_world") == test_worlds ]]
  grep -qE '^\| programs from elsewhere: cuda_test \| (passed|skipped) \|' "$report"
  expect "| build | skipped | 0 | --no-build |" "$report"
  stand_in "$work/there/bin/ddprun" <<END
#!/bin/sh
[ "\$LD_LIBRARY_PATH" = "$work/site/torch/lib:$work/site/nvidia/cu13/lib" ] || exit 127
END
  (unset LD_LIBRARY_PATH && check --build "$work/there") || expect_status 0 $?
  # Where they do not start, the programs are built.
  printf '#!/bin/sh\nexit 127\n' | stand_in "$work/there/bin/cuda_test"
  status=0
  check --build "$work/there" || status=$?
  expect_status 1 $status
  grep -qE '^\| programs from elsewhere: cuda_test \| failed \| [0-9]+ \| status 127: ' "$report"
  grep -qE '^\| configure \| failed \| [0-9]+ \| status 3: error: cmake was called \|' "$report"
  # So they are where the archive does not unpack; a copy without .git has the commit of --collect.
  mkdir -p "$work/torn" "$work/copy/scripts"
  head -c 200 "$work/carried/programs.tar.xz" >"$work/torn/programs.tar.xz"
  echo 0123456789ab >"$work/torn/commit.txt"
  cp -r "$root"/scripts/gpu_check* "$work/copy/scripts"
  status=0
  (root=$work/copy && check --build "$work/torn") || status=$?
  expect_status 1 $status
  [[ ! -e $work/torn/bin ]]
  grep -qE '^\| configure \| failed \| [0-9]+ \| status 3: error: cmake was called \|' "$report"
  expect "Sources: 0123456789ab." "$report"
fi
echo "gpu_check.sh: as expected"
