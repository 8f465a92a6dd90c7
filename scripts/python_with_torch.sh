#!/usr/bin/env bash
# python_with_torch.sh [SCRIPT ARGUMENTS...]: prints a Python that has torch, or runs a script with
# it: of the wheel that Torch_DIR names, of the one that CMake takes (see setup.sh), or the one on
# PATH. Exit code: 1 where none has torch, or 77 with a script; the wheel that setup.sh installs
# without CUDA is for C++ and lacks Python packages that it needs.
set -euo pipefail

# One process, for importing torch takes 2 to 3 s.
run='
import sys
try:
    import torch.nn.parallel
except (ImportError, OSError):
    sys.exit(77)
del sys.argv[0]
if not sys.argv:
    sys.exit()
import os, runpy
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
'

candidates=()
if [[ -n ${Torch_DIR-} ]]; then
  # <environment>/lib/python3.x/site-packages/torch/share/cmake/Torch
  candidates+=("$Torch_DIR/../../../../../../../bin/python3")
fi
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
if [[ -n $cache ]]; then
  candidates+=("$cache/ddp/torch-2.11.0/bin/python3")
fi
candidates+=(python3)

for python in "${candidates[@]}"; do
  path=$(command -v "$python") || continue
  status=0
  "$path" -W ignore -c "$run" "$@" || status=$?
  [[ $status != 77 ]] || continue
  (($# > 0 || status != 0)) || echo "$path"
  exit "$status"
done
echo "python_with_torch: none of ${candidates[*]} has torch" >&2
exit $(($# > 0 ? 77 : 1))
