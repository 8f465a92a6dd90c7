#!/usr/bin/env bash
# Prints a Python that has torch: of the wheel that Torch_DIR names, of the one that CMake takes
# (see setup.sh), or the one on PATH. Fails where none has it; the wheel that setup.sh installs
# without CUDA is for C++ and lacks Python packages that it needs.
set -euo pipefail

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
  if "$python" -c 'import torch.nn.parallel' >/dev/null 2>&1; then
    command -v "$python"
    exit
  fi
done
echo "python_with_torch: none of ${candidates[*]} has torch" >&2
exit 1
