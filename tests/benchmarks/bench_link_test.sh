#!/usr/bin/env bash
# bench_link_test.sh REPOSITORY: runs scripts/bench_link.sh over a real link, with stand-ins for the
# programs, and checks what it leaves behind.
# Exit code: 0 as expected, 1 not, 77 skipped because no network namespace can be made.
set -euo pipefail
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "FAILED: $*"
  exit 1
}

probe=ddp_probe_$$
ip netns add "$probe" 2>/dev/null || {
  echo "skipped: no network namespaces here"
  exit 77
}
ip netns del "$probe"

mkdir "$work/bin" "$work/out"
export CALLS=$work/calls
link() { # ARGUMENTS...; sets `script`
  status=0
  "$root/scripts/bench_link.sh" "$@" --quick --models mlp --bin "$work/bin" --python "" \
    --results "$work/results" --output "$work/out" 1 >"$work/log" 2>&1 &
  script=$!
}
ended() { # sets `status` and `log`
  wait "$script" || status=$?
  log=$(cat "$work/log")
}
expect_nothing_left() { # AFTER_WHAT
  local left
  left=$(ip netns list | grep "ddp_bench_${script}_" || true)
  [[ -z $left ]] || fail "after $1, there still is $left"
  left=$(grep -lE "$work/bin/ddp_bench|60\.5711" /proc/[0-9]*/cmdline 2>/dev/null || true)
  [[ -z $left ]] || fail "after $1, there still run $left"
}

cp "$root/tests/benchmarks/bench_stand_in.sh" "$work/bin/ddp_bench"
mkdir -p "$work/results/link_1"
touch "$work/results/link_1/resnet18-1-cpp.jsonl" # of a previous run
link
ended
[[ $status == 0 ]] || fail "$log"
expect_nothing_left "success"
[[ -e $work/results/link_1/resnet18-1-cpp.jsonl ]] || fail "another model's results are gone"
calls=$(grep -c -- "--backend gloo --model mlp --modes none,flat" "$CALLS")
[[ $calls == 4 ]] || fail "expected two ranks of two processes with all modes, got $calls"
results=$(cat "$work/out/RESULTS.md")
for text in "over a link of 1 Gbit/s" "| mlp | 3.000 x communication alone |  | 1.05 |" \
  "One TCP connection carries 0."; do
  [[ $results == *"$text"* ]] || fail "RESULTS.md: expected '$text' in
$results"
done

# As bench_growth.sh calls it: the fewest modes, and only the all-reduce.
cat >"$work/bin/costs" <<'END'
#!/usr/bin/env bash
echo "rank $RANK of $WORLD_SIZE: $*"
END
chmod +x "$work/bin/costs"
: >"$CALLS"
rm "$work/out/RESULTS.md"
link --short
ended
[[ $status == 0 ]] || fail "--short: $log"
expect_nothing_left "--short"
calls=$(sed 's/ --iters.*//' "$CALLS" | sort | uniq -c | tr -s ' ')
[[ $calls == " 2 --backend gloo --model mlp --modes none,ddp --sweep 1,10,25
 2 --backend gloo --model mlp --modes none,ddp_tuned" ]] || fail "--short ran
$calls"
[[ $(cat "$work/results/link_1/all_reduce/gloo.jsonl") == "rank 0 of 2: all_reduce --backend gloo "* ]] ||
  fail "--short: no all-reduce alone"
[[ ! -e $work/out/RESULTS.md ]] || fail "--short: expected no RESULTS.md"

cat >"$work/bin/ddp_bench" <<'END'
#!/usr/bin/env bash
[[ $RANK == 0 ]] || exit 0
echo "$*" >>"$CALLS"
echo '{"mode":"sleeping","schedule":"1f1b","microbatches":8,"step_ms":600,"ideal_ms":540}'
END
cat >"$work/bin/pipeline_bound" <<'END'
#!/usr/bin/env bash
[[ $* == "1f1b 2 8 20.0 "* ]] && echo 625
END
chmod +x "$work/bin/pipeline_bound"
: >"$CALLS"
link --pipeline
ended
[[ $status == 0 ]] || fail "--pipeline: $log"
calls=$(grep -c -- "--pp --schedule" "$CALLS")
[[ $calls == 4 ]] || fail "--pipeline: expected a schedule with 4 sizes, got $calls"
expected="1f1b, sleeping, 1200 KiB: step 600 ms, computation 540 ms, wire 79 ms: 1.11; its list 625 ms: 0.96"
[[ $log == *"$expected"* ]] || fail "--pipeline: expected '$expected' in $log"

cat >"$work/bin/ddp_bench" <<'END'
#!/usr/bin/env bash
[[ $RANK == 0 ]] || exit 3
sleep 60.5711
END
link
ended
[[ $status == 3 ]] || fail "expected the exit code of the rank that failed, 3, got $status: $log"
expect_nothing_left "a rank that failed"

cat >"$work/bin/ddp_bench" <<'END'
#!/usr/bin/env bash
touch "$CALLS.running"
sleep 60.5711
END
link
for ((i = 0; i < 200; ++i)); do
  [[ ! -e $CALLS.running ]] || break
  sleep 0.1
done
kill -TERM "$script"
ended
[[ $status == 143 ]] || fail "expected 143 after SIGTERM, got $status: $log"
expect_nothing_left "SIGTERM"

echo "bench_link.sh: leaves nothing behind"
