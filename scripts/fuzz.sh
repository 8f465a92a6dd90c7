#!/usr/bin/env bash
# Fuzzes what parses input from outside, with libFuzzer of clang: data files, checkpoints, manifests,
# safetensors, init URLs, environments, store entries and ddprun's options. Inputs that reach new code are kept in
# build/fuzz/corpus; one that crashes goes to build/fuzz, and belongs into tests/fuzz/corpus.
# usage: fuzz.sh [SECONDS [TARGET...]]; default: 60 s for each target
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
seconds=${1:-60}
shift || true

"$root/scripts/setup.sh"
cd "$root"
command -v clang++ >/dev/null || {
  echo "fuzz.sh: expected clang++; install the package clang" >&2
  exit 1
}
mkdir -p build/fuzz
cmake --preset fuzz >build/fuzz/configure.log 2>&1 || {
  cat build/fuzz/configure.log >&2
  exit 1
}
cmake --build build/fuzz --target fuzzer
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(tests/fuzz/corpus/*)
for target in "${targets[@]}"; do
  target=$(basename "$target")
  mkdir -p "build/fuzz/corpus/$target"
  echo "fuzz: $target"
  # LibTorch, not built for it, keeps what it allocates to the end.
  DDP_FUZZ_TARGET=$target ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
    OMP_NUM_THREADS=1 build/fuzz/bin/fuzzer -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="build/fuzz/$target-" "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target"
done
