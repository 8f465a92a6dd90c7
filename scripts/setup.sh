#!/usr/bin/env bash
# Installs what a build needs: see usage() below.
set -euo pipefail

usage() {
  cat <<'END'
usage: scripts/setup.sh [--cpu] [--dev]

Installs what building ddp needs, and does nothing where it is there already:
  - g++, CMake, Ninja, ccache, Catch2 and CLI11, with apt-get (as root or through sudo);
  - LibTorch: the one that Torch_DIR or CMAKE_PREFIX_PATH names, and otherwise the wheel
    torch==2.11.0 in a virtual environment in ${XDG_CACHE_HOME:-~/.cache}/ddp. Where nvcc of a
    CUDA toolkit 13 is found this is the CUDA variant (5 GB), elsewhere the CPU one (1.3 GB).

  --cpu   the CPU variant even where a CUDA toolkit is (then configure with -DDDP_WITH_CUDA=OFF)
  --dev   also clang-format 14 (scripts/format.sh) and Open MPI (one test uses its mpirun)
END
}

readonly torch_version=2.11.0
# What the CPU part of the wheel loads at run time, in the versions that torch 2.11.0 asks for.
readonly cpu_runtime=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

has_header() { [[ -e /usr/include/$1 || -e /usr/local/include/$1 ]]; }
has_catch2() { has_header catch2/catch.hpp || has_header catch2/catch_all.hpp; }
has_cmake() {
  local version
  version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p')
  [[ -n $version && $(printf '%s\n' 3.25 "$version" | sort -V | head -n 1) == 3.25 ]]
}

# Prints the packages that are missing, by looking for what each is needed for, so that a
# compiler or a CMake from elsewhere counts.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  has_cmake || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v ccache >/dev/null || echo ccache
  has_catch2 || echo catch2
  has_header CLI/CLI.hpp || echo libcli11-dev
  python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  if [[ $dev == yes ]]; then
    command -v clang-format-14 >/dev/null || echo clang-format-14
    command -v mpirun >/dev/null || echo openmpi-bin
  fi
}

install_packages() {
  local missing as_root=() log
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} > 0)) || return 0

  local by_hand="apt-get install --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null ||
    fail "these packages are missing, and there is no apt-get to install them with: ${missing[*]} (the names are Debian's; CMake must be 3.25 or newer)"
  if (($(id -u) != 0)); then
    # A password can be asked for only on a terminal.
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
      as_root=(sudo)
    else
      fail "these packages are missing, and installing them takes root: ${missing[*]}
setup: as root, run: $by_hand"
    fi
  fi

  say "installing ${missing[*]}"
  log=$(mktemp)
  # The lock timeout lets two setups at once wait for each other.
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600)
  if ! { "${as_root[@]}" "${apt[@]}" update &&
    "${as_root[@]}" "${apt[@]}" install --yes --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    fail "apt-get failed. By hand, as root: $by_hand"
  fi
  rm -f "$log"
}

# Prints the Torch_DIR that the environment names, if it names one.
given_torch_dir() {
  local prefixes prefix dir
  if [[ -n ${Torch_DIR-} ]]; then
    [[ -e $Torch_DIR/TorchConfig.cmake ]] ||
      fail "Torch_DIR: expected a folder with TorchConfig.cmake, got '$Torch_DIR'"
    echo "$Torch_DIR"
    return
  fi
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH-}"
  for prefix in "${prefixes[@]}"; do
    for dir in "$prefix/share/cmake/Torch" "$prefix/Torch"; do
      if [[ -e $dir/TorchConfig.cmake ]]; then
        echo "$dir"
        return
      fi
    done
  done
}

has_cuda_toolkit_13() {
  local nvcc
  for nvcc in "$(command -v nvcc || true)" "${CUDA_PATH:+$CUDA_PATH/bin/nvcc}" \
    /usr/local/cuda/bin/nvcc; do
    [[ -x $nvcc && $("$nvcc" --version) == *"release 13."* ]] && return
  done
  return 1
}

# Why the wheels in virtual environment $1 cannot be used; nothing when they can.
why_unusable() {
  [[ -e $1/torch-dir ]] || {
    echo "its installation did not finish"
    return
  }
  python3 "$scripts/check_wheels.py" "$1" 2>/dev/null || echo "its contents make no sense"
}

install_wheels() {
  local venv=$1 quiet=(--quiet)
  shift
  if [[ -t 1 ]]; then
    quiet=()
  fi
  rm -rf "$venv"
  python3 -m venv "$venv"
  mkdir "$venv/tmp"
  # The downloads are unpacked beside their destination, since /tmp is often small, and not kept
  # a second time in pip's cache.
  TMPDIR="$venv/tmp" "$venv/bin/python" -m pip install --no-cache-dir \
    --disable-pip-version-check "${quiet[@]}" "$@" ||
    fail "pip could not install $*. Its message is above; the next run starts afresh."
  rm -rf "$venv/tmp"
  python3 "$scripts/check_wheels.py" --seal "$venv"
}

install_torch() {
  local variant=cpu venv why given
  given=$(given_torch_dir)
  if [[ -n $given ]]; then
    say "ready: LibTorch in $given"
    return
  fi
  if [[ $cpu == no ]] && has_cuda_toolkit_13; then
    variant=cuda
  fi

  local cache=${XDG_CACHE_HOME:-$HOME/.cache}/ddp
  mkdir -p "$cache"
  exec {lock}>"$cache/lock"
  flock --nonblock "$lock" || {
    say "waiting for another setup to end"
    flock "$lock"
  }

  # A virtual environment cannot be moved, so it is made where it will stay, and sealed last.
  venv=$cache/torch-$torch_version-$variant
  why=missing
  if [[ -e $venv ]]; then
    why=$(why_unusable "$venv")
    [[ -z $why ]] || say "LibTorch in $venv is broken ($why): installing it again"
  fi
  if [[ -n $why ]]; then
    say "installing LibTorch $torch_version ($variant) in $venv; this takes a few minutes"
    if [[ $variant == cuda ]]; then
      install_wheels "$venv" "torch==$torch_version"
    else
      install_wheels "$venv" --no-deps "torch==$torch_version" "${cpu_runtime[@]}"
    fi
  fi
  say "ready: LibTorch $torch_version ($variant) in $venv"
}

cpu=no
dev=no
for argument in "$@"; do
  case $argument in
    --cpu) cpu=yes ;;
    --dev) dev=yes ;;
    --help | -h)
      usage
      exit
      ;;
    *)
      usage >&2
      fail "unknown argument '$argument'"
      ;;
  esac
done
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

install_packages
install_torch
