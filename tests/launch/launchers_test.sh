#!/bin/sh
# launchers_test.sh LAUNCHER PATH PROBE: runs PROBE (world_probe) on two ranks under LAUNCHER
# (ddprun, torchrun, mpirun, mpiexec or by_hand) and checks that they form one world. The launcher
# alone sets their variables. PATH is the launcher's, or ends in NOTFOUND; by_hand's is python3.
# Exit code: 0 as expected, 1 not, 77 skipped because the launcher is not usable here.
set -u
launcher=$1 path=$2 probe=$3

skip() {
  echo "skipped: $*"
  exit 77
}

case $path in *NOTFOUND) skip "no $launcher is installed" ;; esac
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; do
  unset "$name"
done

case $launcher in
  ddprun) set -- "$path" -n 2 "$probe" ;;
  torchrun) set -- "$path" --no-python --standalone --nproc-per-node 2 "$probe" ;;
  mpirun)
    "$path" --version | grep -q 'Open MPI' || skip "$path is not Open MPI's"
    set -- "$path" -n 2 --allow-run-as-root --oversubscribe "$probe"
    ;;
  mpiexec)
    "$path" --version | grep -q HYDRA || skip "$path is not MPICH's"
    set -- "$path" -n 2 "$probe"
    ;;
  by_hand) # without LOCAL_RANK, as PyTorchJob
    export PYTHONPATH="$(dirname "$0")/../support" WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
    MASTER_PORT=$("$path" -B -c 'from free_port import free_port; print(free_port())')
    export MASTER_PORT
    set -- sh -c 'RANK=1 "$0" & RANK=0 "$0" || exit; wait $!' "$probe"
    ;;
  *)
    echo "launchers_test.sh: unknown launcher '$launcher'"
    exit 1
    ;;
esac

echo "\$ $*"
output=$("$@" 2>&1)
code=$?
printf '%s\n' "$output"
# The wheel may be installed without the packages that its Python part needs.
if [ "$launcher" = torchrun ] && [ "$code" -ne 0 ] && ! "$path" --help >/dev/null 2>&1; then
  skip "$path does not run"
fi
ranks=$(printf '%s\n' "$output" | sed -n 's/^\(\[[0-9]*\] \)\{0,1\}\(rank .*\)/\2/p' | sort)
expected='rank 0 of 2 sum 1 local 0
rank 1 of 2 sum 1 local 1'
if [ "$code" -ne 0 ] || [ "$ranks" != "$expected" ]; then
  echo "FAILED with exit code $code; expected from the ranks:"
  echo "$expected"
  exit 1
fi
