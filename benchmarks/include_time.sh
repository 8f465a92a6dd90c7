#!/usr/bin/env bash
# Measures what <ddp/ddp.h> adds to the compilation of a file that includes <torch/torch.h>: processor seconds,
# compiled in turns with the options of examples/minimal but without a precompiled header, and the
# ratio of the medians. usage: include_time.sh [BUILD_FOLDER [ROUNDS]]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=${1:-$root/build/release} rounds=${2:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The compiler, its definitions and include folders, as this build compiles a one-page program.
mapfile -t compile < <(python3 - "$build/compile_commands.json" <<'END'
import json
import shlex
import sys

commands = json.load(open(sys.argv[1]))
minimal = next(c for c in commands if "/minimal.dir/" in c["command"] and "/cmake_pch" not in c["file"])
words = shlex.split(minimal["command"])
compiler = next(i for i, word in enumerate(words) if word.endswith(("++", "g++", "clang++")))
print(words[compiler])
for before, word in zip(words[compiler:], words[compiler + 1 :]):
    if before == "-isystem" or word.startswith(("-I", "-D", "-isystem", "-std", "-O")):
        print(word)
END
)
printf '#include <torch/torch.h>\n' >"$work/torch.cpp"
printf '#include <ddp/ddp.h>\n#include <torch/torch.h>\n' >"$work/ddp.cpp"

cd "$build" # the folders may be relative
for ((round = 0; round < rounds; ++round)); do
  for source in torch ddp; do
    TIMEFORMAT=%U
    { time "${compile[@]}" -c "$work/$source.cpp" -o "$work/out.o"; } 2>>"$work/$source.times"
  done
done
median() { sort -n "$1" | sed -n "$(((rounds + 1) / 2))p"; }
awk -v torch="$(median "$work/torch.times")" -v ddp="$(median "$work/ddp.times")" \
  'BEGIN { printf "torch.h %.2f s, with ddp.h %.2f s: %.3f\n", torch, ddp, ddp / torch }'
