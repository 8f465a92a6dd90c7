#!/usr/bin/env bash
# Runs scripts/setup.sh against stand-ins for python3, apt-get and id, so that it neither
# downloads nor installs anything. usage: setup_script_test.sh <the scripts folder>
set -euo pipefail

setup=$1/setup.sh
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

# The CPU variant into a cache folder of this test, with the stand-ins first on PATH. Its exit
# status is compared with the first argument.
run_setup() {
  local expected=$1 status=0
  shift
  env -u Torch_DIR -u CMAKE_PREFIX_PATH PATH="$bin:$PATH" XDG_CACHE_HOME="$work/a cache" \
    bash "$setup" --cpu "$@" >"$work/output" 2>&1 || status=$?
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
echo run >>"$work/pip.log"
packages=$(dirname "$0")/../lib/python3.11/site-packages
mkdir -p "$packages"/torch/{lib,share/cmake/Torch} "$packages/torch-2.11.0.dist-info"
printf '12345' >"$packages/torch/lib/libtorch_cpu.so"
printf '123' >"$packages/torch/share/cmake/Torch/TorchConfig.cmake"
printf '%s\n' torch/lib/libtorch_cpu.so,,5 torch/share/cmake/Torch/TorchConfig.cmake,,3 \
  torch-2.11.0.dist-info/RECORD,, >"$packages/torch-2.11.0.dist-info/RECORD"
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

# Two at once: one installs, the other waits and finds the work done.
rm -rf "$venv"
run_setup 0 &
run_setup 0
wait $! || fail "expected both setups to succeed"
expect_pip_runs 5

# A LibTorch that the environment names is taken, and nothing is installed.
export CMAKE_PREFIX_PATH="/nowhere:$venv/lib/python3.11/site-packages/torch"
PATH="$bin:$PATH" XDG_CACHE_HOME="$work/other cache" bash "$setup" >"$work/output" 2>&1 ||
  fail "expected exit status 0"
expect_text "setup: ready: LibTorch in $venv/lib/python3.11/site-packages/torch/share/cmake/Torch"
expect_pip_runs 5
unset CMAKE_PREFIX_PATH

# Packages missing, and nobody who may install them: named exactly, and nothing is touched.
stand_in id <<'END'
#!/usr/bin/env bash
echo 1000
END
stand_in sudo <<'END'
#!/usr/bin/env bash
exit 1
END
stand_in cmake <<'END'
#!/usr/bin/env bash
echo "cmake version 3.16.3"
END
run_setup 1 </dev/null
expect_text "these packages are missing, and installing them takes root: cmake"
expect_text "setup: as root, run: apt-get install --no-install-recommends cmake"
expect_pip_runs 5

echo "setup.sh: all as expected"
