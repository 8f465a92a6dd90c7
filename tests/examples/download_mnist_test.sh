#!/usr/bin/env bash
# Runs scripts/download_mnist.sh against mirrors made of local files: small stand-ins, whose
# checksums replace MNIST's in a copy of the script.
#
#     tests/examples/download_mnist_test.sh path/to/download_mnist.sh
set -euo pipefail
script=$1
if ! command -v curl >/dev/null; then # wget knows no file:// mirrors
  echo "skipped: no curl"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
good=$work/good bad=$work/bad cut=$work/cut folder=$work/mnist
names="train-images-idx3-ubyte train-labels-idx1-ubyte"
names+=" t10k-images-idx3-ubyte t10k-labels-idx1-ubyte"
mkdir "$good" "$bad" "$cut"

sum() { sha256sum "$1" | cut -d' ' -f1; }
published() { # NAME: the two checksums in the script
  grep -A 2 "^$1 " "$script" | grep -oE '^[0-9a-f]{64}'
}

cp "$script" "$work/download.sh"
for name in $names; do
  { echo "stand-in for $name"; seq 2000; } >"$work/$name"
  gzip --no-name --stdout "$work/$name" >"$good/$name.gz"
  echo "not $name" | gzip --stdout >"$bad/$name.gz"
  mapfile -t real < <(published "$name")
  [ "${#real[@]}" = 2 ]
  sed -i "s/${real[0]}/$(sum "$good/$name.gz")/; s/${real[1]}/$(sum "$work/$name")/" \
    "$work/download.sh"
done

fail() {
  echo "FAILED: $*" >&2
  cat "$work/log" >&2
  exit 1
}
run() { # MIRRORS... : its output is in log
  MNIST_MIRRORS="$*" bash "$work/download.sh" "$folder" >"$work/log" 2>&1
}
complete() {
  for name in $names; do cmp "$work/$name" "$folder/$name" || return 1; done
  [ "$(find "$folder" -type f | wc -l)" = 4 ]
}
fetched() { grep -c '^fetching' "$work/log" || true; }

env -u HOME -u XDG_CACHE_HOME bash "$work/download.sh" >"$work/log" 2>&1 &&
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

rm -r "$folder" && mkdir "$folder"
head -c 1000 "$good/train-images-idx3-ubyte.gz" >"$folder/train-images-idx3-ubyte.gz.part"
# This mirror lacks the first 1000 bytes, so only a script that goes on from the part succeeds.
cp "$good"/*.gz "$cut"
head -c 1000 /dev/zero | dd of="$cut/train-images-idx3-ubyte.gz" conv=notrunc status=none
run "file://$cut" || fail "a part"
complete || fail "a part is gone on from"

rm -r "$folder" && mkdir "$folder"
for name in $names; do seq 99999 >"$folder/$name.gz.part"; done # longer than the real files
run "file://$good" || fail "wrong parts"
complete || fail "wrong parts are dropped"
echo "all passed"
