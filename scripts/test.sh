#!/usr/bin/env bash
# Sets up, builds everything and runs every test, two at once a core: most of them wait. Arguments
# go to ctest, for instance -R reducer.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

"$root/scripts/build.sh"
cd "$root"
exec ctest --preset release --no-label-summary --parallel $((2 * $(nproc))) "$@"
