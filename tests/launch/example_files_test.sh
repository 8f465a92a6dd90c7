#!/usr/bin/env bash
# example_files_test.sh FOLDER MPIRUN PROBE DDPRUN: the files of examples/launch start the ranks
# that they describe. Open MPI's is run with mpirun; SLURM's with stand-ins for srun and scontrol
# that set the variables of SLURM's manual; of Kubernetes' files, ddprun's arguments start the ranks of
# one pod.
set -euo pipefail
folder=$1 mpirun=$2 probe=$3 ddprun=$4

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; do unset "$name"; done

expect_ranks() { # WHAT RANKS OUTPUT
  local sum=$(($2 * ($2 - 1) / 2)) found
  found=$(grep -o "rank [0-9]* of $2 sum $sum " <<<"$3" | sort -u | wc -l)
  [[ $found == "$2" ]] || fail "$1: expected $2 ranks that met, got
$3"
}

for file in "$folder"/*.sh "$folder"/*.sbatch; do
  bash -n "$file" || fail "$file is no script"
done
# The time of another limit begins when the first rank has succeeded, too.
for file in "$folder"/*.sbatch; do
  grep -q '^[a-z ]*srun .*--wait=0 ' "$file" || fail "$file: expected srun --wait=0"
done

if [[ $mpirun != *NOTFOUND ]] && "$mpirun" --version | grep -q 'Open MPI'; then
  output=$(PATH="$(dirname "$mpirun"):$PATH" "$folder/openmpi.sh" 3 "$probe" 2>&1) || fail "openmpi.sh: $output"
  expect_ranks openmpi.sh 3 "$output"
  if output=$(HOSTFILE=hosts "$folder/openmpi.sh" 2 "$probe" 2>&1); then
    fail "openmpi.sh: expected an error without MASTER_ADDR"
  fi
  [[ $output == *"MASTER_ADDR: expected the host of rank 0"* ]] || fail "openmpi.sh: $output"
else
  echo "not tried: openmpi.sh, no Open MPI is installed"
fi

# Starts a task for each of 4 numbers on one node, or one task on each of two nodes.
cat >"$work/srun" <<'END'
#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_JOB_ID=$JOB SLURM_STEP_ID=0 SLURM_NTASKS=$TASKS SLURM_JOB_NODELIST=localhost
pids=()
for ((task = 0; task < TASKS; ++task)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=$task SLURM_NNODES=$TASKS "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
END
cat >"$work/scontrol" <<'END'
#!/bin/sh
case $1 in requeue) echo "$2" >>"$REQUEUED" ;; *) echo localhost ;; esac
END
ln -s "$ddprun" "$work/ddprun"
chmod +x "$work/srun" "$work/scontrol"
export PATH=$work:$PATH JOB=$((RANDOM * 32768 + RANDOM)) SLURM_CPUS_PER_TASK=1 REQUEUED=$work/requeued
export SLURM_JOB_NODELIST=localhost

next_job() { export SLURM_JOB_ID=$((++JOB)); } # the scripts derive a port from its number

next_job
output=$(TASKS=4 bash "$folder/slurm.sbatch" "$probe" shm 2>&1) || fail "slurm.sbatch: $output"
expect_ranks slurm.sbatch 4 "$output"
for file in slurm_ddprun elastic; do
  next_job
  output=$(TASKS=2 bash "$folder/$file.sbatch" "$probe" 2>&1) ||
    fail "$file.sbatch: $output"
  expect_ranks "$file.sbatch" 8 "$output"
done
[[ ! -e $REQUEUED ]] || fail "expected no job to be queued again that has ended well"

# A job that failed, or left with code 143, is queued again, with an end.
for file in slurm slurm_ddprun; do
  for count in 0 9 10; do
    rm -f "$REQUEUED"
    code=0
    next_job
    output=$(TASKS=1 SLURM_RESTART_COUNT=$count \
      bash "$folder/$file.sbatch" sh -c 'exit 143' 2>&1) || code=$?
    [[ $code == 143 ]] || fail "$file.sbatch: expected code 143, got $code: $output"
    if ((count < 10)); then
      [[ $(<"$REQUEUED") == "$JOB" ]] || fail "$file.sbatch: expected job $JOB in the queue: $output"
    else
      [[ ! -e $REQUEUED ]] || fail "$file.sbatch: expected an end after 10 restarts"
    fi
  done
done

# ddprun's arguments, up to the program, for the first and only pod.
for file in kubernetes jobset trainjob; do
  mapfile -t arguments < <(sed -n '/^ *args:/,/^ *- "--"$/s/^ *- "\(.*\)"$/\1/p' "$folder/$file.yaml" |
    sed -E "s/\\$\((JOB_COMPLETION_INDEX|PET_NODE_RANK)\)/0/; s/\\$\(PET_NNODES\)/4/
      s/^(train-0.train|train-node-0-0.train|\\$\(PET_MASTER_ADDR\)):(29500|\\$\(PET_MASTER_PORT\))$/ENDPOINT/")
  [[ ${arguments[*]} == "-n 2 --nnodes 4 --node-rank 0 --rdzv-endpoint ENDPOINT --max-restarts 3 --grace 25 --" ]] ||
    fail "$file.yaml: ${arguments[*]}"
  next_job
  arguments[3]=1
  arguments[7]=localhost:$((10000 + JOB % 20000))
  output=$("$ddprun" "${arguments[@]}" "$probe" 2>&1) || fail "$file.yaml: $output"
  expect_ranks "$file.yaml" 2 "$output"
done
echo "all started the ranks they say"
