#!/usr/bin/env bash
# Runs scripts/bench_growth.sh: with bad arguments, and a short run of three of its sections, with
# the real programs. usage: bench_growth_test.sh <the repository> <the folder of programs>
set -euo pipefail
root=$1 bin=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "FAILED: $*"
  exit 1
}
refused() { # TEXT ARGUMENTS...
  local status=0 output
  output=$("$root/scripts/bench_growth.sh" --results "$work/none" --output "$work/none" \
    "${@:2}" 2>&1) || status=$?
  [[ $status == 1 && $output == "bench_growth: $1" ]] || fail "${*:2}: expected '$1', got $status
$output"
  [[ ! -e $work/none ]] || fail "${*:2}: was refused, and has written something"
}
mkdir "$work/empty"
sections=collectives,parameters,ranks,setup,links
refused "unknown argument '--quik'; --help says which there are" --quik
refused "--only needs a value" --only
refused "--only: expected some of $sections, got 'rank'" --only rank
refused "--only: expected some of $sections, got ''" --only ""
refused "--models: expected some of mlp,resnet18, got 'vgg'" --models vgg
refused "--rates: expected rates in Gbit/s, got '1,1g'" --rates 1,1g
refused "--rates: expected rates in Gbit/s, got '0'" --rates 0
refused "--bin: expected a folder, got '$work/no'" --only ranks --bin "$work/no"
refused "ranks: expected ddprun in $work/empty" --only ranks --bin "$work/empty"

measure() { # SECTIONS
  "$root/scripts/bench_growth.sh" --quick --only "$1" --bin "$bin" --python "" \
    --results "$work/results" --output "$work/a page" >"$work/log" 2>&1 || fail "--only $1:
$(cat "$work/log")"
  page=$(cat "$work/a page/GROWTH.md")
}
expect() { # TEXT
  [[ $page == *"$1"* ]] || fail "GROWTH.md: expected '$1' in
$page"
}
measure collectives,parameters
expect "A quick run"
expect "| GB/s | memcpy | shm | shm, its memory | gloo |"
expect "| 4 MiB | "
expect "ns a parameter"
expect "| 400 | "
[[ $page != *"## Setting up"* ]] || fail "GROWTH.md: a section that was not measured"
for plot in all_reduce parameters; do
  [[ -s "$work/a page/plots/growth_$plot.svg" ]] || fail "no plot of $plot"
  expect "(plots/growth_$plot.svg)"
done

# Another section is added to the measured ones.
measure setup
expect "## Parameters"
expect "| ranks | ddp, gloo, s | wrap, s | ddp, default, s | wrap, s |"
[[ $page =~ \|\ 8(\ \|\ [0-9]+\.[0-9]{3}){4} ]] || fail "GROWTH.md: no setup of 8 ranks in
$page"
[[ $page =~ \|\ 8(\ \|\ [0-9]+\.[0-9]{3}){3}\ \|\ [0-9]+\.[0-9]\ \|\ -?[0-9]+\.[0-9]\ \| ]] ||
  fail "GROWTH.md: no 8 ranks of one process in
$page"

echo "bench_growth.sh: all as expected"
