#!/usr/bin/env bash
# Runs scripts/download_cifar.sh with mirrors made of local files: small stand-ins, whose checksums
# replace those of the archives in a copy of the script.
#
#     tests/examples/download_cifar_test.sh path/to/download_cifar.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download_testing.sh"

ten=cifar-10-binary.tar.gz
ten_files=(data_batch_{1,2,3,4,5}.bin test_batch.bin batches.meta.txt)
hundred=cifar-100-binary.tar.gz
hundred_files=({train,test}.bin {fine,coarse}_label_names.txt)

mapfile -t real < <(grep -oE '[0-9a-f]{64}' "$script")
[ "${#real[@]}" = 2 ]
stand_in() { # ARCHIVE SHA256 FOLDER_IN_IT FILES... : a right archive and a wrong one
  local archive=$1 published=$2 inside=$3 name
  shift 3
  mkdir "$work/$inside"
  for name in "$@" readme.html; do
    { echo "stand-in for $name"; seq 2000; } >"$work/$inside/$name"
  done
  tar -czf "$good/$archive" -C "$work" "$inside"
  echo "not $archive" | gzip --stdout >"$bad/$archive"
  sed -i "s/$published/$(sum "$good/$archive")/" "$copy"
}
stand_in "$ten" "${real[0]}" cifar-10-batches-bin "${ten_files[@]}"
stand_in "$hundred" "${real[1]}" cifar-100-binary "${hundred_files[@]}"

arguments=("$folder")
run() { # MIRRORS... : its output is in log
  CIFAR_MIRRORS="$*" bash "$copy" "${arguments[@]}" >"$work/log" 2>&1
}
has_all() { # FOLDER_IN_ARCHIVE FILES... : and their checksums, and nothing else
  local inside=$1 name
  shift
  for name in "$@"; do cmp "$work/$inside/$name" "$folder/$name" || return 1; done
  [ "$(find "$folder" -mindepth 1 | wc -l)" = $(($# + 1)) ]
}
complete() { has_all cifar-10-batches-bin "${ten_files[@]}"; }
restart() { rm -r "$folder" && mkdir "$folder"; }

env -u HOME -u XDG_CACHE_HOME bash "$copy" >"$work/log" 2>&1 &&
  fail "expected no success without a folder"
grep -q "no place for CIFAR-10: name a folder, or set HOME or XDG_CACHE_HOME" "$work/log" ||
  fail "says what to set"

refuses() { # ARGUMENTS...
  CIFAR_MIRRORS="file://$good" bash "$copy" "$@" >"$work/log" 2>&1 &&
    fail "expected no success with: $*"
  grep -q "^usage: scripts/download_cifar.sh \[--100\] \[FOLDER\]$" "$work/log" || fail "says usage"
}
refuses --1000
refuses "$folder" more
refuses --100 "$folder" more
refuses "$folder" --100
[ ! -e "$folder" ] || fail "wrong usage makes no folder"

run "file://$good" || fail "a right mirror"
complete || fail "a right mirror gives the files, their checksums and nothing else"
[ "$(fetched)" = 1 ] || fail "the archive is fetched once"
grep -q "^CIFAR-10 is in $folder.$" "$work/log" || fail "says where it is"

run "file://$work/nowhere" || fail "a second run needs no mirror"
[ "$(fetched)" = 0 ] || fail "a second run fetches nothing"

for name in data_batch_3.bin batches.meta.txt cifar-10.sha256; do
  echo "damaged" >"$folder/$name"
  run "file://$good" || fail "a damaged $name"
  complete || fail "a damaged $name is replaced"
  rm "$folder/$name"
  run "file://$good" || fail "a missing $name"
  complete || fail "a missing $name is replaced"
done

restart
run "file://$bad" && fail "a wrong archive must be refused"
grep -q "$ten: expected sha256 $(sum "$good/$ten"), got $(sum "$bad/$ten")" "$work/log" ||
  fail "the refusal names archive and checksums"
grep -q "no mirror gave a right $ten" "$work/log" || fail "the refusal says what to do"
[ -z "$(find "$folder" -mindepth 1)" ] || fail "a wrong archive leaves nothing behind"

run "file://$bad" "file://$work/nowhere" "file://$good" || fail "the next mirror"
complete || fail "the next mirror makes up for a wrong one"

restart
cut_download "$ten"
run "file://$cut" || fail "a part"
complete || fail "a part is gone on from"

restart
seq 99999 >"$folder/$ten.part" # longer than the real one
run "file://$good" || fail "a wrong part"
complete || fail "a wrong part is dropped"

# A server that answers with an error, such as for a missing file.
mkdir "$work/stub"
cat >"$work/stub/curl" <<STUB
#!/usr/bin/env bash
[[ \${!#} != https://down/* ]] || exit 22
exec $(command -v curl) "\$@"
STUB
chmod +x "$work/stub/curl"
restart
cut_download "$ten"
PATH=$work/stub:$PATH run "https://down" && fail "a server that is down"
cmp "$folder/$ten.part" <(head -c 1000 "$good/$ten") || fail "its error leaves the part alone"
PATH=$work/stub:$PATH run "https://down" "file://$cut" || fail "the part, from the next mirror"
complete || fail "the next mirror goes on from the part"

# The state after a stop before the last file was in its place.
restart
cp "$good/$ten" "$folder/$ten.part"
cp "$work/cifar-10-batches-bin/data_batch_1.bin" "$folder"
mkdir "$folder/$ten.unpacked"
echo "half" >"$folder/$ten.unpacked/test_batch.bin"
run "file://$work/nowhere" || fail "an archive that is there"
complete || fail "an archive that is there is unpacked"

arguments=(--100 "$folder")
run "file://$good" || fail "CIFAR-100 beside CIFAR-10"
[ "$(fetched)" = 1 ] || fail "CIFAR-10's checksums are not CIFAR-100's"
restart
run "file://$good" || fail "CIFAR-100"
has_all cifar-100-binary "${hundred_files[@]}" || fail "CIFAR-100 gives its files"
grep -q "^CIFAR-100 is in $folder.$" "$work/log" || fail "says that it is CIFAR-100"
env -u HOME XDG_CACHE_HOME="$work/cache" CIFAR_MIRRORS="file://$good" bash "$copy" --100 \
  >"$work/log" 2>&1 || fail "the default folder"
[ -f "$work/cache/ddp/cifar100/train.bin" ] || fail "the default folder is in the cache"
echo "all passed"
