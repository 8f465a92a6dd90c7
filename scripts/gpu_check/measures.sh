# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# Counts and times: alone on the GPU, each beside Python's.

# One part of ddp_cuda_census, and of Python's, at a number of ranks.
measure() { # PART RANKS SECONDS
  local label="$1, $2 of a GPU"
  programs "$label" "$3" ddp_cuda_census "$share" "$2" "$bin/ddp_cuda_census" nccl "$1"
  keep_lines "$label" "$1.jsonl"
  [[ -f $root/benchmarks/peers/cuda_census.py && $1 != memory ]] || return
  on_gpu "$label, Python" "$3" "" "$share" "$2" "$python" "$root/benchmarks/peers/cuda_census.py" "$1"
  keep_lines "$label, Python" "$1.jsonl"
}
run_census() { measure census 2 100; }
# Last, as it says least that the others do not.
run_census_alone() { has_time "census, 1 of a GPU" 60 && measure census 1 100; }
run_memory() { measure memory 2 90; }
run_times() { measure times 1 60; }

# Both languages, one after the other, in a process of one rank each.
time_steps() { # MODEL DTYPE BATCH ROUNDS
  local label="$1, $2, batch x $3" file=steps/$1-$2-x$3 options launch=("$bin/ddprun" -n 1 --no-prefix)
  local modes=none,c10d,ddp,ddp_view peer_modes=none,py_ddp,py_ddp_view
  local peer=$root/benchmarks/peers/ddp_peer.py
  # With a hook a single rank packs, sends and unpacks, as several do.
  ! "$bin/ddp_bench" --help 2>/dev/null | grep -q ddp_hook || modes+=,ddp_hook
  ! grep -q py_ddp_hook "$peer" || peer_modes+=,py_ddp_hook
  options=(--model "$1" --dtype "$2" --batch "$3" --backend nccl --iters 10 --rounds "$4")
  on_gpu "$label" 60 "ddprun ddp_bench" \
    "${launch[@]}" "$bin/ddp_bench" --modes "$modes" "${options[@]}"
  [[ $has_gpu == yes ]] || return
  keep_lines "$label" "$file-cpp.jsonl"
  programs "$label, Python" 60 ddprun \
    "${launch[@]}" "$python" "$peer" --modes "$peer_modes" "${options[@]}"
  keep_lines "$label, Python" "$file-py.jsonl"
}
time_sharded_layers() {
  local label="fully sharded layers" launch=("$bin/ddprun" -n 1 --no-prefix)
  on_gpu "$label" 40 "ddprun ddp_bench" "${launch[@]}" "$bin/ddp_bench" --fsdp --backend nccl
  keep_lines "$label" fsdp.jsonl
  on_gpu "$label, Python" 40 ddprun "${launch[@]}" "$python" \
    "$root/benchmarks/peers/fully_sharded_peer.py" --backend nccl
  keep_lines "$label, Python" fsdp.jsonl
}
# In the order of what the pages quote first.
run_benchmark() {
  note_clocks before
  time_steps resnet18 float32 1 12
  time_steps small_params float32 1 6
  time_sharded_layers
  time_steps transformer bfloat16 1 16
  ! has_time "transformer, bfloat16, batch x 16" 60 || time_steps transformer bfloat16 16 16
  note_clocks after
  [[ -n $(ls "$results/steps") ]] || return
  part "$targets" 30 python3 "$root/benchmarks/report/gpu_report.py" "$results/steps"
}
