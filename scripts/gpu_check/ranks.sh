# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# Values and failures: ranks that share the GPU, the tests that need one, the sanitizer.

# Python first: where this fails, NCCL itself does.
run_python() {
  on_gpu "NCCL, two ranks of a GPU, by Python" 60 "" "$share" 2 "$python" -c 'import torch, torch.distributed as dist
dist.init_process_group("nccl")
ones = torch.ones(1, device="cuda:0")
dist.all_reduce(ones)
assert ones.item() == 2, ones
print("NCCL", torch.cuda.nccl.version())
dist.destroy_process_group()'
}

# Two ranks of an elastic job, of which one is killed in its backward pass.
run_elastic() {
  local optimizer
  for optimizer in adamw zero; do
    beside on_gpu "elastic, 2 of a GPU, killed in backward: $optimizer" 150 "ddprun ddp_elastic_kill" \
      "$root/scripts/gpu_check/elastic_kill.sh" "$bin" cpu:gloo,cuda:nccl "$optimizer"
  done
  wait
}

run_two_ranks() {
  local name label="nccl, 2 of a GPU" world=("$share" 2 "$bin/ddp_cuda_world" nccl)
  NCCL_DEBUG=INFO beside programs "$label: averages" 60 ddp_cuda_world "${world[@]}" averages
  beside programs "$label: parts" 60 ddp_cuda_world "${world[@]}" parts
  beside programs "$label: models" 60 ddp_cuda_world "${world[@]}" models
  beside programs "$label: timeout" 90 ddp_cuda_failures "$share" 2 "$bin/ddp_cuda_failures" timeout
  JUDGED=0 beside programs "$label: killed" 60 ddp_cuda_failures \
    "$share" 2 "$bin/ddp_cuda_failures" killed
  for name in connects split polls messages dropped captured settle leaves sparse units barrier throws \
    two_groups connects_alone; do
    beside programs "$label: $name" 60 ddp_cuda_failures "$share" 2 "$bin/ddp_cuda_failures" "$name"
  done
  wait
}

# Neighbours that differ, stages in the middle, and axes that are not the whole world.
run_four_ranks() {
  local name label="nccl, 4 of a GPU" world=("$share" 4 "$bin/ddp_cuda_world" nccl)
  programs "$label: grids" 150 ddp_cuda_world "${world[@]}" grids # alone: it makes most groups
  for name in models averages; do
    beside programs "$label: $name" 150 ddp_cuda_world "${world[@]}" "$name"
  done
  wait
}

# Variables that users may set, each in one short run.
run_modes() {
  local setting
  for setting in DDP_DISABLE_COMM_MEM=0 TORCH_NCCL_BLOCKING_WAIT=1 TORCH_NCCL_NAN_CHECK=1 \
    CUDA_LAUNCH_BLOCKING=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; do
    beside programs "nccl, 2 of a GPU, $setting" 90 ddp_cuda_world \
      env "$setting" "$share" 2 "$bin/ddp_cuda_world" nccl averages
  done
  wait
}

run_tests() {
  local name world ranks backend cases
  start_sanitizer
  for name in "${tests[@]}"; do
    [[ $name == cuda_stream_test ]] || beside programs "$name" 100 "$name" "$bin/$name"
  done
  for world in "1 nccl averages" "2 gloo averages" "4 gloo averages" "2 gloo parts" "2 gloo models"; do
    read -r ranks backend cases <<<"$world"
    beside programs "$backend, $ranks of a GPU: $cases" 60 "ddprun ddp_cuda_world" \
      "$bin/ddprun" -n "$ranks" "$bin/ddp_cuda_world" "$backend" "$cases"
  done
  wait
  # Alone: its cases look how far the host runs ahead.
  programs cuda_stream_test 100 cuda_stream_test "$bin/cuda_stream_test"
}

# Twice: with each tensor in memory of its own, so that a use outside of it or past its end shows;
# and with the driver's stream-ordered memory, of which the tool sees a use that does not wait for
# another stream.
start_sanitizer() {
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
}
