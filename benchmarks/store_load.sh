#!/bin/sh
# What ranks that wait for a late one ask of the store, at several world sizes: a line of JSON each.
#
#     benchmarks/store_load.sh [BIN] [RANKS]...
#
# BIN has ddprun and store_load; by default the release build's.
set -eu
bin=${1:-$(dirname "$0")/../build/release/bin}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 2 8 32 64
for ranks in "$@"; do
  "$bin/ddprun" -n "$ranks" -- "$bin/store_load" | sed 's/^\[0\] //'
done
