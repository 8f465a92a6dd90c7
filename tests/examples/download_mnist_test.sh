#!/usr/bin/env bash
# Runs scripts/download_mnist.sh with mirrors made of local files: small stand-ins, whose checksums
# replace those of MNIST in a copy of the script.
#
#     tests/examples/download_mnist_test.sh path/to/download_mnist.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download_testing.sh"

names="train-images-idx3-ubyte train-labels-idx1-ubyte"
names+=" t10k-images-idx3-ubyte t10k-labels-idx1-ubyte"

published() { # NAME: the two checksums in the script
  grep -A 2 "^$1 " "$script" | grep -oE '^[0-9a-f]{64}'
}

for name in $names; do
  { echo "stand-in for $name"; seq 2000; } >"$work/$name"
  gzip --no-name --stdout "$work/$name" >"$good/$name.gz"
  echo "not $name" | gzip --stdout >"$bad/$name.gz"
  mapfile -t real < <(published "$name")
  [ "${#real[@]}" = 2 ]
  sed -i "s/${real[0]}/$(sum "$good/$name.gz")/; s/${real[1]}/$(sum "$work/$name")/" \
    "$copy"
done

run() { # MIRRORS... : its output is in log
  MNIST_MIRRORS="$*" bash "$copy" "$folder" >"$work/log" 2>&1
}
complete() {
  for name in $names; do cmp "$work/$name" "$folder/$name" || return 1; done
  [ "$(find "$folder" -type f | wc -l)" = 4 ]
}

env -u HOME -u XDG_CACHE_HOME bash "$copy" >"$work/log" 2>&1 &&
  fail "expected no success without a folder"
grep -q "name a folder, or set HOME or XDG_CACHE_HOME" "$work/log" || fail "says what to set"

run "file://$good" || fail "a right mirror"
complete || fail "a right mirror gives four files and leaves no others"
[ "$(fetched)" = 4 ] || fail "each file is fetched once"

run "file://$work/nowhere" || fail "a second run needs no mirror"
[ "$(fetched)" = 0 ] || fail "a second run fetches nothing"

echo "damaged" >"$folder/t10k-labels-idx1-ubyte"
run "file://$good" || fail "a damaged file"
complete || fail "a damaged file is replaced"
[ "$(fetched)" = 1 ] || fail "only the damaged file is fetched again"

rm -r "$folder"
run "file://$bad" && fail "a wrong file must be refused"
name=train-images-idx3-ubyte.gz
grep -q "$name: expected sha256 $(sum "$good/$name"), got $(sum "$bad/$name")" "$work/log" ||
  fail "the refusal names file and checksums"
[ -z "$(find "$folder" -type f)" ] || fail "a wrong file leaves nothing behind"

run "file://$bad" "file://$work/nowhere" "file://$good" || fail "the next mirror"
complete || fail "the next mirror makes up for a wrong one"

rm -r "$folder"
cp "$good"/*.gz "$cut"
cut_download train-images-idx3-ubyte.gz
run "file://$cut" || fail "a part"
complete || fail "a part is gone on from"

rm -r "$folder" && mkdir "$folder"
for name in $names; do seq 99999 >"$folder/$name.gz.part"; done # longer than the real files
run "file://$good" || fail "wrong parts"
complete || fail "wrong parts are dropped"
echo "all passed"
