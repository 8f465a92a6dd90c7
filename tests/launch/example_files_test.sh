#!/usr/bin/env bash
# example_files_test.sh FOLDER MPIRUN PROBE DDPRUN: the files of examples/launch start the ranks
# that they describe. Open MPI's is run with mpirun; SLURM's with stand-ins for srun and scontrol
# that set the variables of SLURM's manual; for Kubernetes, only ddprun's arguments are checked.
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
printf '#!/bin/sh\necho localhost\n' >"$work/scontrol"
ln -s "$ddprun" "$work/ddprun"
chmod +x "$work/srun" "$work/scontrol"
export PATH=$work:$PATH JOB=$((RANDOM * 32768 + RANDOM)) SLURM_CPUS_PER_TASK=1

output=$(TASKS=4 bash "$folder/slurm.sbatch" "$probe" shm 2>&1) || fail "slurm.sbatch: $output"
expect_ranks slurm.sbatch 4 "$output"
output=$(TASKS=2 SLURM_JOB_ID=$((JOB + 1)) SLURM_JOB_NODELIST=localhost \
  bash "$folder/slurm_ddprun.sbatch" "$probe" 2>&1) || fail "slurm_ddprun.sbatch: $output"
expect_ranks slurm_ddprun.sbatch 8 "$output"

# The arguments in kubernetes.yaml, with a pod's number in place of the variable.
mapfile -t arguments < <(sed -n '/ args:/,/ env:/s/^ *- "\(.*\)"$/\1/p' "$folder/kubernetes.yaml" |
  sed 's/\$(JOB_COMPLETION_INDEX)/0/; s/train-0.train:29500/localhost:29501/')
[[ ${#arguments[@]} == 13 ]] || fail "kubernetes.yaml: expected 13 arguments, got ${arguments[*]}"
arguments[3]=1 # one pod
arguments=("${arguments[@]:0:8}" "$probe")
output=$("$ddprun" "${arguments[@]}" 2>&1) || fail "kubernetes.yaml: $output"
expect_ranks kubernetes.yaml 2 "$output"
echo "all started the ranks they say"
