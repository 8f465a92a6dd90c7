#!/usr/bin/env bash
# Replaces ddp_bench and its peer, or a ddprun that starts them: appends its command to the file
# CALLS and prints what rank 0 would: a line for each mode, or a timeline.
set -euo pipefail
echo "$* OMP_NUM_THREADS=$OMP_NUM_THREADS" >>"$CALLS"
[[ ${RANK:-0} == 0 ]] || exit 0
caps=null memory=no
while (($# > 0)); do
  case $1 in
    --memory) memory=yes ;;
    --model) model=$2 ;;
    --modes) modes=$2 ;;
    --sweep) caps=${2//,/ } ;;
    --timeline) timeline=$2 ;;
  esac
  shift
done
for mode in ${modes//,/ }; do
  if [[ $memory == yes ]]; then
    peak=$([[ $mode == none ]] && echo 100 || echo 300)
    echo "{\"model\":\"$model\",\"mode\":\"$mode\",\"backend\":\"shm\",\"world\":2,\"bytes\":100000000,\
\"peak_bytes\":${peak}000000,\"anonymous_bytes\":90000000,\"shared_bytes\":10000000,\"file_bytes\":5}"
    continue
  fi
  case $mode in
    c10d | ddp | py_ddp) of_mode=$caps ;;
    ddp_tuned) of_mode=8 ;;
    *) of_mode=null ;;
  esac
  for cap in $of_mode; do
    echo "{\"model\":\"$model\",\"mode\":\"$mode\",\"backend\":\"gloo\",\"world\":2,\"bucket_cap_mb\":$cap,\
\"step_ms\":12,\"step_ms_p10\":11,\"step_ms_p90\":13,\
\"ratio\":1.2,\"ratio_low\":null,\"ratio_high\":null,\"ratio_of_rounds\":[1.2,1.2],\"cpu_ms\":9,\
\"cpu_ratio\":1.1,\"cpu_ratio_low\":null,\"cpu_ratio_high\":null,\"cpu_ratio_of_rounds\":[1.1,1.1],\
\"compute_ms\":10,\"comm_ms\":4,\"overlap\":0.5,\"bytes\":8,\"checksum\":1.5}"
  done
done
[[ -z ${timeline-} ]] || echo "{\"model\":\"$model\",\"mode\":\"ddp\",\"world\":2,\"ranks\":[[\
{\"track\":\"compute\",\"name\":\"forward\",\"start_ms\":0,\"end_ms\":1,\"bytes\":0}]]}" >"$timeline"
