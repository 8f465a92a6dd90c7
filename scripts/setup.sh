#!/usr/bin/env bash
# Installs what a build needs: see usage() below.
set -euo pipefail

usage() {
  cat <<'END'
usage: scripts/setup.sh [--cpu] [--dev] [--aarch64] [--torch VERSION]

Installs what building ddp needs, and does nothing where it is there already:
  - g++, CMake, Ninja, ccache, Catch2, CLI11 and libarchive, with apt-get (as root or through sudo);
  - LibTorch: the one that Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH names, and otherwise the
    wheel torch==VERSION in a virtual environment in ${XDG_CACHE_HOME:-~/.cache}/ddp. Where nvcc of
    a CUDA toolkit 13 is found this is the CUDA variant (5 GB), elsewhere the CPU one (1.3 GB).
    CMake takes the variant that the last setup made ready.

  --cpu            the CPU variant even where a CUDA toolkit is
  --dev            also clang-format 14 (scripts/format.sh), clang-tidy 14 (scripts/tidy.sh), clang (tests, and
                   tests of the packages), Open MPI and MPICH (the backend over MPI; mpirun stays Open MPI's, which has
                   the higher priority), Doxygen (scripts/docs.sh), OpenSSH's server (a test starts it), and SLURM with
                   munge and iproute2 (a test starts them on hosts that are namespaces)
  --aarch64        also what scripts/aarch64.sh compiles with: clang, and the cross compiler with its headers
  --torch VERSION  2.11.0 (the default, and what CMake takes by itself), 2.12.1, 2.13.0, 2.14.1 or 2.15.0
END
}

# What the CPU part of each wheel loads at run time, in the versions that the wheel asks for.
readonly cuda_13_0="nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85"
declare -rA cpu_runtime=(
  [2.11.0]=$cuda_13_0
  [2.12.1]=$cuda_13_0
  [2.13.0]=$cuda_13_0
  [2.14.1]=$cuda_13_0
  [2.15.0]="nvidia-cuda-runtime==13.2.86 nvidia-cuda-cupti==13.2.86"
)

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

is_installed() { # PACKAGE
  [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}
# "none" when it does not run.
cmake_version() {
  local version
  version=$(cmake --version 2>/dev/null) || version="cmake version none"
  sed -n 's/^cmake version //p' <<<"$version"
}
has_cmake() {
  local version
  version=$(cmake_version)
  [[ $version == [0-9]* && $(printf '%s\n' 3.25 "$version" | sort -V | head -n 1) == 3.25 ]]
}
# Asks CMake, which looks in more places than one can list. While there is none to ask, what is
# installed counts.
has_cmake_package() { # NAME PACKAGE
  if has_cmake; then
    (cd "$scratch" && cmake --find-package -DNAME="$1" -DCOMPILER_ID=GNU -DLANGUAGE=CXX \
      -DMODE=EXIST) >/dev/null 2>&1
  else
    is_installed "$2"
  fi
}

# Debian's SLURM, which a test starts on made-up hosts; elsewhere it is skipped.
missing_slurm() {
  local package
  command -v dpkg-query >/dev/null || return 0
  for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge; do
    is_installed "$package" || echo "$package"
  done
}

# Prints the packages that are missing, by looking for what each is needed for, so that a
# compiler or a CMake from elsewhere counts.
missing_packages() {
  command -v g++ >/dev/null || echo g++
  has_cmake || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v ccache >/dev/null || echo ccache
  has_cmake_package Catch2 catch2 || echo catch2
  has_cmake_package CLI11 libcli11-dev || echo libcli11-dev
  # Read by tar_shards() when a program runs. Debian's CMake brings it, and pip's does not.
  python3 -c 'import ctypes; ctypes.CDLL("libarchive.so.13")' 2>/dev/null || echo libarchive-dev
  python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  if [[ $dev == yes ]]; then
    command -v clang-format-14 >/dev/null || echo clang-format-14
    command -v clang-tidy-14 >/dev/null || echo clang-tidy-14
    command -v mpirun >/dev/null || echo openmpi-bin
    command -v mpicxx.openmpi >/dev/null || echo libopenmpi-dev
    command -v mpiexec.mpich >/dev/null || echo mpich
    command -v mpicxx.mpich >/dev/null || echo libmpich-dev
    command -v doxygen >/dev/null || echo doxygen
    command -v ip >/dev/null || echo iproute2
    missing_slurm
    # Users have no /usr/sbin on PATH.
    command -v sshd >/dev/null || is_installed openssh-server || echo openssh-server
  fi
  if [[ $dev == yes || $aarch64 == yes ]]; then
    command -v clang++ >/dev/null || echo clang
  fi
  if [[ $aarch64 == yes ]]; then
    command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
  fi
}

# Stops when packages are installed and yet count as missing: something else is found in their
# place, and installing them again would not change that.
stop_at_hidden() { # PACKAGES...
  local package program fault path found=no
  for package in "$@"; do
    is_installed "$package" || continue
    found=yes program=$package fault=""
    case $package in
      cmake) fault="is version $(cmake_version), and 3.25 or newer is needed" ;;
      ninja-build) program=ninja ;;
      clang) program=clang++ ;;
      catch2 | libcli11-dev) program=cmake fault="does not find it" ;;
      python3-venv) program=python3 fault="lacks the modules ensurepip and venv" ;;
      openmpi-bin) program=mpirun ;;
      libopenmpi-dev) program=mpicxx.openmpi ;;
      mpich) program=mpiexec.mpich ;;
      libmpich-dev) program=mpicxx.mpich ;;
      iproute2) program=ip ;;
      g++-aarch64-linux-gnu) program=aarch64-linux-gnu-g++ ;;
    esac
    path=$(command -v "$program") || path=nowhere
    echo "setup: $package is installed, but $program on PATH is $path${fault:+, which $fault}" >&2
  done
  [[ $found == no ]] || fail "change PATH so that the right one comes first, and run this again"
}

install_packages() {
  local missing as_root=()
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} > 0)) || return 0
  stop_at_hidden "${missing[@]}"

  local without_root="or without root: 'python3 -m venv ~/tools && ~/tools/bin/pip install cmake ninja', with
setup: ~/tools/bin on PATH; CLI11 and Catch2 from their sources with 'cmake --install BUILD --prefix ~/tools',
setup: and ~/tools in CMAKE_PREFIX_PATH beside LibTorch (pip install torch). ccache may be missing, and Catch2
setup: with -DDDP_BUILD_TESTS=OFF."
  local by_hand="apt-get install --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null ||
    fail "these packages are missing, and there is no apt-get to install them with: ${missing[*]} (the names are Debian's; CMake must be 3.25 or newer)
setup: $without_root"
  if (($(id -u) != 0)); then
    # A password can be asked for only on a terminal.
    if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
      as_root=(sudo)
    else
      fail "these packages are missing, and installing them takes root: ${missing[*]}
setup: as root, run: $by_hand
setup: $without_root"
    fi
  fi

  say "installing ${missing[*]}"
  # The lock timeout lets two setups at once wait for each other.
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=600)
  # One of many sources that does not answer need not be one that has to.
  "${apt[@]}" update >"$scratch/log" 2>&1 || say "apt-get update failed; trying all the same"
  if ! "${apt[@]}" install --yes --no-install-recommends "${missing[@]}" \
    >>"$scratch/log" 2>&1; then
    cat "$scratch/log" >&2
    fail "apt-get failed. By hand, as root: $by_hand"
  fi
  mapfile -t missing < <(missing_packages)
  stop_at_hidden "${missing[@]}"
  ((${#missing[@]} == 0)) || fail "apt-get says it is done, and these are still missing: ${missing[*]}"
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
  IFS=: read -ra prefixes <<<"${Torch_ROOT-}:${CMAKE_PREFIX_PATH-}"
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
    [[ $asked_version == no ]] ||
      fail "--torch: the environment names a LibTorch already, in $given; unset Torch_DIR, Torch_ROOT and CMAKE_PREFIX_PATH"
    say "ready: LibTorch in $given"
    return
  fi
  if [[ $cpu == no ]] && has_cuda_toolkit_13; then
    variant=cuda
  fi

  local cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
  [[ -n $cache ]] || fail "no place for LibTorch: set HOME or XDG_CACHE_HOME"
  cache+=/ddp
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
      # shellcheck disable=SC2086 # two words
      install_wheels "$venv" --no-deps "torch==$torch_version" ${cpu_runtime[$torch_version]}
    fi
  fi
  # The one that CMake will take.
  ln -sfn "${venv##*/}" "$cache/torch-$torch_version"
  say "ready: LibTorch $torch_version ($variant) in $venv"
}

cpu=no
dev=no
aarch64=no
torch_version=2.11.0
asked_version=no
while (($# > 0)); do
  case $1 in
    --cpu) cpu=yes ;;
    --dev) dev=yes ;;
    --aarch64) aarch64=yes ;;
    --torch)
      torch_version=${2-}
      [[ -n $torch_version && -n ${cpu_runtime[$torch_version]-} ]] ||
        fail "--torch: expected one of $(printf '%s\n' "${!cpu_runtime[@]}" | sort -V | paste -s -d ' '), got '$torch_version'"
      asked_version=yes
      shift
      ;;
    --help | -h)
      usage
      exit
      ;;
    *)
      usage >&2
      fail "unknown argument '$1'"
      ;;
  esac
  shift
done
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

install_packages
install_torch
