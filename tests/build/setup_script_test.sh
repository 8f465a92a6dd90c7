#!/usr/bin/env bash
# Runs scripts/setup.sh against stand-ins for python3, apt-get and others, so that it neither
# downloads nor installs anything. usage: setup_script_test.sh <the scripts folder>
set -euo pipefail

setup=$1/setup.sh
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin="$work/stand-ins"
mkdir "$bin"

fail() {
  echo "FAILED: $*"
  echo "setup.sh said:"
  cat "$work/output"
  exit 1
}
expect_text() { grep -qF -- "$1" "$work/output" || fail "expected the output to contain: $1"; }
expect_pip_runs() {
  local runs
  runs=$(wc -l <"$work/pip.log")
  ((runs == $1)) || fail "expected pip to have run $1 times so far, got $runs"
}

# Sets up the CPU variant in a cache folder of this test, with the stand-ins first on PATH. Compares
# the exit status with the first argument.
run_setup() {
  local expected=$1 status=0
  shift
  PATH="$bin:$PATH" XDG_CACHE_HOME="$work/a cache" bash "$setup" --cpu "$@" \
    >"$work/output" 2>&1 || status=$?
  ((status == expected)) || fail "expected exit status $expected, got $status"
}

stand_in() {
  cat >"$bin/$1"
  chmod +x "$bin/$1"
}

real_python3=$(command -v python3)
export real_python3 work
touch "$work/pip.log"
# `python3 -m venv DIR` makes a DIR whose pip installs a two-file torch.
stand_in python3 <<'END'
#!/usr/bin/env bash
[[ "$1 $2" == "-m venv" ]] || exec "$real_python3" "$@"
mkdir -p "$3/bin"
cat >"$3/bin/python" <<'PIP'
#!/usr/bin/env bash
version=2.11.0
[[ "$*" != *torch==2.15.0* ]] || version=2.15.0
echo run >>"$work/pip.log"
packages=$(dirname "$0")/../lib/python3.11/site-packages
mkdir -p "$packages"/torch/{lib,share/cmake/Torch} "$packages/torch-$version.dist-info"
printf '12345' >"$packages/torch/lib/libtorch_cpu.so"
printf '#..' >"$packages/torch/share/cmake/Torch/TorchConfig.cmake"
cat >"$packages/torch/share/cmake/Torch/TorchConfigVersion.cmake" <<VERSION
set(PACKAGE_VERSION $version)
set(PACKAGE_VERSION_COMPATIBLE TRUE)
VERSION
printf '%s\n' torch/lib/libtorch_cpu.so,,5 torch/share/cmake/Torch/TorchConfig.cmake,,3 \
  "torch-$version.dist-info/RECORD,," >"$packages/torch-$version.dist-info/RECORD"
if [[ -e $work/pip-is-cut-off ]]; then
  exit 1
fi
PIP
chmod +x "$3/bin/python"
END
stand_in apt-get <<'END'
#!/usr/bin/env bash
echo "apt-get must not run here"
exit 1
END
venv="$work/a cache/ddp/torch-2.11.0-cpu"
library="$venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"

run_setup 1 --nonsense
expect_text "unknown argument '--nonsense'"
run_setup 1 --torch 1.0
expect_text "setup: --torch: expected one of "
expect_text ", got '1.0'"
run_setup 1 --torch
expect_text ", got ''"

touch "$work/pip-is-cut-off"
run_setup 1
expect_text "pip could not install"
expect_pip_runs 1

rm "$work/pip-is-cut-off"
run_setup 0
expect_text "is broken (its installation did not finish): installing it again"
expect_pip_runs 2

run_setup 0
expect_text "setup: ready: LibTorch 2.11.0 (cpu) in $venv"
expect_pip_runs 2

printf '1234' >"$library"
run_setup 0
expect_text "is broken (torch/lib/libtorch_cpu.so has 4 bytes instead of 5): installing it again"
expect_pip_runs 3

rm "$library"
run_setup 0
expect_text "is broken (torch/lib/libtorch_cpu.so is missing): installing it again"
expect_pip_runs 4

# Two at once: one installs, the other waits and finds the installation.
rm -rf "$venv"
run_setup 0 &
run_setup 0
wait $! || fail "expected both setups to succeed"
expect_pip_runs 5

# A LibTorch that the environment names is used, and nothing is installed.
export CMAKE_PREFIX_PATH="/nowhere:$venv/lib/python3.11/site-packages/torch"
PATH="$bin:$PATH" XDG_CACHE_HOME="$work/other cache" bash "$setup" >"$work/output" 2>&1 ||
  fail "expected exit status 0"
expect_text "setup: ready: LibTorch in $venv/lib/python3.11/site-packages/torch/share/cmake/Torch"
expect_pip_runs 5
run_setup 1 --torch 2.15.0
expect_text "setup: --torch: the environment names a LibTorch already"
expect_pip_runs 5
unset CMAKE_PREFIX_PATH

# Checks that CMake uses the variant of the last setup.
expect_cmake_takes() { # VARIANT [WHEEL]
  local wheel=${2:-2.11.0}
  PATH="$bin:$PATH" XDG_CACHE_HOME="$work/a cache" cmake -G Ninja -S "$work/project" \
    -B "$work/build" "-DDDP_TORCH_WHEEL=$wheel" >"$work/output" 2>&1 ||
    fail "expected cmake to find LibTorch"
  expect_text "LibTorch $wheel in $work/a cache/ddp/torch-$wheel-$1/"
}
mkdir "$work/project"
cat >"$work/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(which LANGUAGES NONE)
include("$1/../cmake/DdpTorch.cmake")
END
stand_in nvcc <<'END'
#!/usr/bin/env bash
echo "Cuda compilation tools, release 13.0, V13.0.88"
END
expect_cmake_takes cpu
PATH="$bin:$PATH" XDG_CACHE_HOME="$work/a cache" bash "$setup" >"$work/output" 2>&1 ||
  fail "expected exit status 0"
expect_text "setup: ready: LibTorch 2.11.0 (cuda) in $work/a cache/ddp/torch-2.11.0-cuda"
expect_cmake_takes cuda
run_setup 0
expect_cmake_takes cpu
expect_pip_runs 6

# Another version is installed beside it when it is asked for.
run_setup 0 --torch 2.15.0
expect_text "setup: ready: LibTorch 2.15.0 (cpu) in $work/a cache/ddp/torch-2.15.0-cpu"
expect_pip_runs 7
expect_cmake_takes cpu
expect_cmake_takes cpu 2.15.0
expect_cmake_takes cpu

Torch_ROOT="$venv/lib/python3.11/site-packages/torch" run_setup 0
expect_text "setup: ready: LibTorch in $venv/lib/python3.11/site-packages/torch/share/cmake/Torch"

status=0
env -u HOME -u XDG_CACHE_HOME PATH="$bin:$PATH" bash "$setup" --cpu >"$work/output" 2>&1 ||
  status=$?
((status == 1)) || fail "expected exit status 1 without HOME, got $status"
expect_text "setup: no place for LibTorch: set HOME or XDG_CACHE_HOME"

# Packages are missing. A file lists the packages that dpkg reports as installed; apt-get appends
# its arguments to a log and runs the commands of another file.
touch "$work/apt.log"
stand_in dpkg-query <<'END'
#!/usr/bin/env bash
! grep -qx -- "${@: -1}" "$work/installed" || printf installed
END
stand_in apt-get <<'END'
#!/usr/bin/env bash
for word in "$@"; do
  [[ $word != update ]] || { echo update >>"$work/apt.log"; exec bash "$work/on-update"; }
done
echo "install ${*: -1}" >>"$work/apt.log"
bash "$work/on-install"
END
stand_in id <<'END'
#!/usr/bin/env bash
echo 1000
END
stand_in sudo <<'END'
#!/usr/bin/env bash
exit 1
END
old_cmake() {
  stand_in cmake <<'END'
#!/usr/bin/env bash
echo "cmake version 3.16.3"
END
}
expect_apt_runs() {
  local expected=("$@") runs
  mapfile -t runs <"$work/apt.log"
  [[ "${runs[*]}" == "${expected[*]}" ]] ||
    fail "expected apt-get's runs to be: ${expected[*]}; got: ${runs[*]}"
  : >"$work/apt.log"
}
printf '%s\n' catch2 libcli11-dev >"$work/installed"
: >"$work/on-update"

# A user who may not install packages: they are named exactly, and nothing changes.
old_cmake
run_setup 1 </dev/null
expect_text "these packages are missing, and installing them takes root: cmake"
expect_text "setup: as root, run: apt-get install --no-install-recommends cmake"
expect_apt_runs

# --dev asks for more packages, and --aarch64 for two, if their programs are not on PATH.
rm "$bin/cmake"
mkdir "$work/programs"
IFS=: read -ra folders <<<"${PATH#"$bin:"}"
for folder in "${folders[@]}"; do
  find "$folder/" -maxdepth 1 ! -type d -exec ln -s -t "$work/programs" {} + 2>/dev/null || true
done
rm -f "$work"/programs/{clang-format-14,clang-tidy-14,clang++,mpirun,mpicxx.openmpi,mpiexec.mpich,mpicxx.mpich,doxygen,ip,sshd}
rm -f "$work"/programs/aarch64-linux-gnu-g++
for program in g++ ninja ccache cmake; do
  [[ -e $work/programs/$program ]] || ln -s "$(command -v true)" "$work/programs/$program"
done
PATH=$work/programs run_setup 1 --dev </dev/null
expect_text "takes root: clang-format-14 clang-tidy-14 openmpi-bin libopenmpi-dev mpich libmpich-dev doxygen iproute2 slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge openssh-server clang"
PATH=$work/programs run_setup 1 --aarch64 </dev/null
expect_text "takes root: clang g++-aarch64-linux-gnu"
echo doxygen >>"$work/installed"
PATH=$work/programs run_setup 1 --dev </dev/null
expect_text "setup: doxygen is installed, but doxygen on PATH is nowhere"
printf '%s\n' catch2 libcli11-dev >"$work/installed"
expect_apt_runs
old_cmake

# As root, where one of the package sources does not answer.
stand_in id <<'END'
#!/usr/bin/env bash
echo 0
END
echo "echo 'E: no such host' >&2; exit 100" >"$work/on-update"
echo "rm '$bin/cmake'; echo cmake >>'$work/installed'" >"$work/on-install"
run_setup 0
expect_text "setup: apt-get update failed; trying all the same"
expect_apt_runs update "install cmake"
run_setup 0
expect_apt_runs
: >"$work/on-update"

# An installation that fails.
grep -vx cmake "$work/installed" >"$work/rest" || true
mv "$work/rest" "$work/installed"
old_cmake
echo "echo 'E: no space left' >&2; exit 100" >"$work/on-install"
run_setup 1
expect_text "E: no space left"
expect_text "setup: apt-get failed. By hand, as root: apt-get install --no-install-recommends cmake"
expect_apt_runs update "install cmake"

# An installation that reports success without installing.
: >"$work/on-install"
run_setup 1
expect_text "setup: apt-get says it is done, and these are still missing: cmake"
expect_apt_runs update "install cmake"

# An old CMake is found before the installed one: setup names it after the installation, and from
# then on without another installation.
echo "echo cmake >>'$work/installed'" >"$work/on-install"
hidden="setup: cmake is installed, but cmake on PATH is $bin/cmake, which is version 3.16.3"
run_setup 1
expect_text "$hidden, and 3.25 or newer is needed"
expect_apt_runs update "install cmake"
run_setup 1
expect_text "$hidden, and 3.25 or newer is needed"
expect_text "setup: change PATH so that the right one comes first, and run this again"
expect_apt_runs
stand_in cmake <<'END'
#!/usr/bin/env bash
exit 1
END
run_setup 1
expect_text "cmake on PATH is $bin/cmake, which is version none"

# A CMake that does not find CLI11 in spite of its headers.
real_cmake=$(PATH=${PATH#"$bin:"} command -v cmake)
export real_cmake
stand_in cmake <<'END'
#!/usr/bin/env bash
[[ "$*" != *-DNAME=CLI11* ]] && exec "$real_cmake" "$@"
exit 1
END
run_setup 1
expect_text "setup: libcli11-dev is installed, but cmake on PATH is $bin/cmake, which does not find it"
rm "$bin/cmake"

# A Python without the modules that make virtual environments.
echo python3-venv >>"$work/installed"
mv "$bin/python3" "$bin/python3-whole"
stand_in python3 <<'END'
#!/usr/bin/env bash
[[ "$*" != *ensurepip* ]] && exec "$(dirname "$0")/python3-whole" "$@"
exit 1
END
run_setup 1
expect_text "python3 on PATH is $bin/python3, which lacks the modules ensurepip and venv"
expect_apt_runs
expect_pip_runs 7

echo "setup.sh: all as expected"
