#!/usr/bin/env bash
# Runs scripts/bench.sh with a stand-in for the programs, and bench_link.sh where it has to fail.
# usage: bench_scripts_test.sh <the repository>
set -euo pipefail

root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

stand_in() { # FILE, with the script on standard input
  cat >"$1"
  chmod +x "$1"
}
mkdir "$work/bin"
cp "$root/tests/benchmarks/bench_stand_in.sh" "$work/bin/ddprun"
stand_in "$work/bin/ddp_bench" </dev/null
stand_in "$work/bin/costs" <<'END'
#!/usr/bin/env bash
[[ $* == reducer ]] || exit 1
echo "engine            step ms   above none us / parameter"
echo "ddp, unused        20.000        0.880          1.100"
echo "c10d, unused       24.000        4.400          5.500"
END

fail() {
  echo "FAILED: $*"
  exit 1
}
expect() { # WHAT EXPECTED GOT
  [[ $2 == "$3" ]] || fail "$1: expected
$2
got
$3"
}

export CALLS=$work/calls
mkdir "$work/out"
bench() { # ARGUMENTS...
  : >"$CALLS"
  "$root/scripts/bench.sh" "$@" --bin "$work/bin" --python "$work/python" \
    --results "$work/results" --output "$work/out" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
}
calls_with() { # PATTERN
  grep -c -e "$1" "$CALLS" || true
}
bench --quick --models mnist,small_params

# The order of programs: C++ before Python in the first pass, after it in the second.
order=$(sed -n "s|.*/\(ddp_bench\) --model \([a-z_]*\) --modes none.*|\1 \2|p
                s|.*/\(ddp_peer\).py --model \([a-z_]*\) --modes none.*|\1 \2|p" "$CALLS")
expect "the order of processes" "ddp_bench mnist
ddp_peer mnist
ddp_bench small_params
ddp_peer small_params
ddp_peer mnist
ddp_bench mnist
ddp_peer small_params
ddp_bench small_params" "$order"
expect "calls without one thread for each rank" "" "$(grep -v OMP_NUM_THREADS=1 "$CALLS" || true)"
results=$(cat "$work/out/RESULTS.md")
for text in "## mnist" "| small_params | 1.200 x none | needs 6 rounds | 1.02 | missed by 17.6% |" \
  "| py_ddp_static |" "plots/timeline_mnist.svg" "A quick run" \
  "| ddp, unused | 20.00 | 0.880 | 0.880 | 0.200 | 0.15 | missed by 33.3% |" "| mnist | 8 MiB | 1.200 | - |"; do
  [[ $results == *"$text"* ]] || fail "RESULTS.md: expected '$text' in
$results"
done

expect "memory of a model that was not asked for" 0 "$(calls_with --memory)"

bench --models mlp
for mode in none c10d ddp ddp_view; do
  expect "processes with the memory of $mode" 4 \
    "$(calls_with "ddp_bench --memory --model mlp --iters [0-9]* --modes $mode ")"
done
for mode in none py_ddp py_ddp_view; do
  expect "processes of Python with the memory of $mode" 4 \
    "$(calls_with "ddp_peer.py --memory --model mlp --iters [0-9]* --modes $mode ")"
done
expect "processes with all modes" 4 "$(calls_with 'ddp_bench .*--modes none,naive')"
expect "sweeps" 4 "$(calls_with 'ddp_bench .*--modes none,c10d,ddp,ddp_tuned --sweep')"
expect "sweeps over Gloo" 2 "$(calls_with 'ddp_bench .*--sweep .*--backend gloo')"
results=$(cat "$work/out/RESULTS.md")
[[ $results == *"| mlp | 8 MiB | 1.200 | 1 MiB | 1.200 | +0.0% | met |"* ]] ||
  fail "RESULTS.md: expected the size that was tuned beside the best of the sweep in
$results"
for text in "### mlp, 100.0 MB of gradients" "| 1.200 | 1.200 | 1.200 | 9.0 | 1.100 | 1.100 |" \
  "| ddp | 300.0 | 300.0 | 90.0 | 10.0 | 200.0 | 2.00 | 210.0 | missed by 42.9% |" \
  "| py_ddp | 300.0 | 300.0 | 90.0 | 10.0 | 200.0 | 2.00 |  |  |"; do
  [[ $results == *"$text"* ]] || fail "RESULTS.md: expected '$text' in
$results"
done
[[ $results == *"## Over Gloo on one host"*"### mlp"* ]] || fail "RESULTS.md: no loopback in
$results"
bench --models mlp --passes 3
expect "processes with all modes and --passes 3" 3 "$(calls_with 'ddp_bench .*--modes none,naive')"
expect "sweeps with --passes 3" 6 "$(calls_with 'ddp_bench .*--sweep')"

"$root/scripts/bench.sh" --quick --models mnist --bin "$work/bin" --python "" \
  --results "$work/quick" >"$work/log" 2>&1 || fail "$(cat "$work/log")"
[[ -s $work/quick/RESULTS.md ]] || fail "a quick run writes to the results, not over the full ones"

status=0
output=$("$root/scripts/bench.sh" --quik 2>&1) || status=$?
[[ $status == 1 && $output == *"unknown argument '--quik'"* ]] || fail "bench.sh --quik: $output"

status=0
output=$("$root/scripts/bench_link.sh" 1g 2>&1) || status=$?
[[ $status == 1 && $output == *"expected a rate in Gbit/s, got '1g'"* ]] ||
  fail "bench_link.sh 1g: $output"

as_nobody=()
if (($(id -u) == 0)); then
  as_nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
fi
status=0
mkdir "$work/scripts"
cp "$root/scripts/bench_link.sh" "$work/scripts" # "nobody" may have no access to the repository
chmod 755 "$work"
output=$("${as_nobody[@]}" "$work/scripts/bench_link.sh" 1 2>&1) || status=$?
[[ $status == 1 && $output == *"bench_link: needs root"* ]] || fail "bench_link.sh, not root: $output"

echo "bench scripts: all as expected"
