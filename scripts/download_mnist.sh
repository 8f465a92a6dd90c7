#!/usr/bin/env bash
# Fetches MNIST's four files (11 MB, 55 MB unpacked), checks them, and unpacks them into a folder:
#
#     scripts/download_mnist.sh [FOLDER]        default: ${XDG_CACHE_HOME:-~/.cache}/ddp/mnist
#
# What is there and right is left alone; what was cut off goes on where it stopped. A file gets its
# name only once it is complete and its checksum is right. MNIST_MIRRORS replaces the two mirrors.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/download.sh"

folder=${1:-$(default_folder mnist)}
mirrors=${MNIST_MIRRORS:-"https://ossci-datasets.s3.amazonaws.com/mnist
                          https://storage.googleapis.com/cvdf-datasets/mnist"}

# name, sha256 of name.gz, sha256 of name
files="\
train-images-idx3-ubyte \
440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 \
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
train-labels-idx1-ubyte \
3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c \
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
t10k-images-idx3-ubyte \
8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 \
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
t10k-labels-idx1-ubyte \
f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6 \
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"

unpack() { # NAME SHA256
  gunzip --stdout <"$folder/$1.gz.part" >"$folder/$1.part"
  has_sum "$folder/$1.part" "$2" || die "$1: expected sha256 $2 after unpacking, got another."
  mv "$folder/$1.part" "$folder/$1"
  rm "$folder/$1.gz.part"
}

prepare_folder MNIST
while read -r name packed_sum sum; do
  has_sum "$folder/$name" "$sum" && continue
  download "$name.gz" "$packed_sum" ||
    die "no mirror gave a right $name.gz. Check the network and run it again: it goes on from here."
  unpack "$name" "$sum"
done <<<"$files"
echo "MNIST is in $folder. Train on it with: ./scripts/mnist.sh --data $folder"
