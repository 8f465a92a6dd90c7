#!/usr/bin/env bash
# Runs Doxygen on the public headers, and once more on an incomplete header, for which it has to
# report faults. usage: reference_test.sh <the repository> <an output folder>
set -euo pipefail
# Other versions report other faults.
version=$(doxygen --version 2>/dev/null || true)
[[ $version == 1.9.4* ]] || {
  echo "skipped: no Doxygen 1.9.4, but ${version:-none}"
  exit 0
}
output=$2
rm -rf "$output"
mkdir -p "$output/headers"
cd "$1"

run() { # SETTINGS...
  (cat docs/site/Doxyfile && printf '%s\n' "OUTPUT_DIRECTORY = $output" "$@") | doxygen -
}

run
for name in sum default_group ddp::DistributedSampler bucket_cap_mb DDP_VERSION ddp::SummonFullParams; do
  grep -q "<name>$name</name>" "$output/xml/index.xml" || {
    echo "FAILED: expected $name in the reference"
    exit 1
  }
done
if grep -q '<compoundname>[^<]*detail' "$output"/xml/*.xml; then
  echo "FAILED: expected nothing of namespace detail in the reference"
  exit 1
fi

printf '%s\n' '/// Words.' 'namespace ddp {' 'int without_words();' '}' >"$output/headers/a.h"
if run "INPUT = $output/headers" 2>"$output/log"; then
  echo "FAILED: expected Doxygen to refuse a function without words"
  exit 1
fi
grep -q "without_words.* is not documented" "$output/log" || {
  cat "$output/log"
  exit 1
}
echo "reference: all as expected"
