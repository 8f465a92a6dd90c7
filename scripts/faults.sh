#!/usr/bin/env bash
# Sets up, builds and runs the fault matrix: a rank is lost in each phase of a training, in each way,
# over each transport and launcher. Writes the table of docs/faults.md.
#   faults.sh              all 1,080 cases, about an hour on two cores
#   faults.sh --part 2/6   a sixth of them; the table has all parts that were run on this commit
#   faults.sh --jobs 8     so many cases at a time (default 4); --only REGEX those of such a name
# Exit code: 0 where every case did what docs/faults.md says.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release

"$root/scripts/build.sh" ddprun fault_world
torchrun=$(sed -n 's/^DDP_TORCHRUN:FILEPATH=//p' "$build/CMakeCache.txt")
mkdir -p "$build/faults"
results=$build/faults/$(git -C "$root" rev-parse HEAD).jsonl
[[ " $* " == *" --part"* || " $* " == *" --only"* ]] || rm -f "$results"
exec python3 "$root/tests/faults/fault_matrix.py" --bin "$build/bin" --torchrun "$torchrun" \
  --results "$results" --table "$root/docs/faults.md" "$@"
