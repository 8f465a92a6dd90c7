#!/usr/bin/env bash
# Packs two finished builds as a wheel, installs it in a new virtual environment beside LibTorch's, and builds and runs
# an installed example there, without ddp's sources and without a CUDA toolkit. The folder has a space in its name.
# usage: wheel_test.sh SOURCE_DIR STATIC_BUILD SHARED_BUILD TORCH_DIR CMAKE WORK_DIR
set -euo pipefail
source=$1 static=$2 shared=$3 torch=$4 cmake=$5 work=$6

fail() {
  echo "wheel_test.sh: $*" >&2
  exit 1
}
expect() { # WORDS TEXT
  [[ $2 == *"$1"* ]] || fail "expected '$1', got: $2"
}

rm -rf "$work"
mkdir -p "$work"

for bad in "--unknown" "--builds $static"; do
  # shellcheck disable=SC2086 # words
  if said=$("$source/scripts/wheel.sh" $bad 2>&1); then
    fail "wheel.sh $bad: expected an error, got: $said"
  fi
  expect "--builds" "$said"
done
if said=$("$source/scripts/wheel.sh" --builds "$shared" "$static" "$work/swapped" 2>&1); then
  fail "expected an error where the builds are swapped, got: $said"
fi
expect "expected a finished build of static libraries in $shared" "$said"

mkdir "$work/older"
touch "$work/older/libddp.so"
sed 's/^set(DDP_TORCH_BUILT_WITH .*/set(DDP_TORCH_BUILT_WITH "2.10.0")/' "$shared/ddpConfig.cmake" >"$work/older/ddpConfig.cmake"
if said=$("$source/scripts/wheel.sh" --builds "$static" "$work/older" "$work/mixed" 2>&1); then
  fail "expected an error where the builds have two LibTorchs, got: $said"
fi
expect "expected two builds with one LibTorch" "$said"

mkdir "$work/wheel"
touch "$work/wheel/ddp-0.0.1-py3-none-any.whl"
wheel=$("$source/scripts/wheel.sh" --builds "$static" "$shared" "$work/wheel")
expect "+torch2." "$wheel"
expect "-py3-none-manylinux_2_" "$wheel"
[[ -e $work/wheel/ddp-0.0.1-py3-none-any.whl ]] || fail "expected another version's wheel to stay"
# RHEL 9 has the C library 2.34 with the C++ library of g++ 11.
if [[ $(objdump -T "$shared/libddp.so") == *"(GLIBCXX_3.4.30)"* ]] && ! [[ $wheel =~ manylinux_2_(3[5-9]|[4-9]) ]]; then
  fail "expected a tag of systems with g++ 12's C++ library, got $wheel"
fi

# The libraries of an environment of LibTorch's wheel: its packages are beside ddp's, whatever installed them.
beside=$(cd "$torch/../../../.." && pwd)
[[ -d $beside/torch ]] || {
  echo "skipped: LibTorch in $torch is no wheel"
  exit 77
}
python3 -m venv "$work/env"
site=$(echo "$work"/env/lib/python3.*/site-packages)
python=$work/env/bin/python
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"
expect "expected LibTorch's wheel beside this one, in $site" "$("$python" -m ddp --examples 2>&1)"
if said=$("$work/env/bin/ddp_consolidate" --version 2>&1); then
  fail "expected an error without LibTorch, got: $said"
fi
expect "expected LibTorch's wheel beside this one, in $site" "$said"
for package in "$beside"/*; do
  [[ -e $site/${package##*/} ]] || ln -s "$package" "$site"
done
expect "torch==2." "$("$python" -c 'import importlib.metadata as m; print(*m.requires("ddp"))')"
expect "licenses/LICENSE" "$("$python" -m pip show --files ddp)"

# A user whose environment says nothing.
alone() { env -u LD_LIBRARY_PATH -u Torch_DIR -u Torch_ROOT -u CMAKE_PREFIX_PATH -u XDG_CACHE_HOME HOME="$work" "$@"; }
for program in ddprun ddp_plan ddp_consolidate; do
  expect "$program 0." "$(alone "$work/env/bin/$program" --version)"
done
prefix=$("$python" -m ddp --cmake-prefix-path 2>&1)
[[ -d $prefix ]] || fail "expected a folder, got: $prefix"
# A program finds LibTorch where its own DT_RPATH says, but not past a DT_RUNPATH of the library.
expect "(RPATH)" "$(readelf -d "$prefix"/lib*/libddp.so.0.*)"
for name in "$source" "$static" "$shared" "$beside/torch"; do
  ! grep -rlF --binary-files=without-match "$name/" "$prefix" || fail "expected no file to name $name"
  ! grep -lF "$name/" "$prefix"/bin/* "$prefix"/lib*/*.so.* || fail "expected no program to name $name"
done

cp -r "$("$python" -m ddp --examples)" "$work/examples"
configure() { # BUILD ARGUMENTS...
  alone "$cmake" -S "$work/examples" -B "$work/$1" -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" \
    "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG" "${@:2}"
}
# pip has no CLI11, so the first example does without.
configure shared -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON -DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON
"$cmake" --build "$work/shared" --target minimal
expect "libddp.so.0." "$(readelf -d "$work/shared/bin/minimal")"
expect "y = 2.9" "$(alone "$work/env/bin/ddprun" -n 2 "$work/shared/bin/minimal")"

configure static -DDDP_USE_STATIC_LIBS=ON
expect "libddp_core.a" "$(grep LINK_LIBRARIES "$work/static/build.ninja")"

"$python" -m pip uninstall --quiet --yes ddp
left=$(find "$work/env/bin" "$site" -maxdepth 1 -name 'ddp*')
[[ -z $left ]] || fail "expected nothing to be left, got: $left"
