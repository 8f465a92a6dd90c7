#!/usr/bin/env bash
# clang-tidy 14 with the checks of .clang-tidy: see usage() below.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'END_OF_USAGE'
usage: scripts/tidy.sh [FILES]

Checks all sources, and the headers that they include; with FILES (sources, or folders of them), those alone.
It configures build/tidy, and compiles nothing. LibTorch's headers take seconds to parse, so sources
are checked ten at a time, as the build compiles them.
END_OF_USAGE
}
fail() {
  echo "tidy: $*" >&2
  exit 1
}

case ${1-} in
  --help | -h)
    usage
    exit
    ;;
  -*)
    usage >&2
    fail "unknown argument '$1'"
    ;;
esac
# Another major version has other checks, and other findings.
tidy=$(command -v clang-tidy-14 || command -v clang-tidy || true)
[[ -n $tidy && $("$tidy" --version) == *"version 14."* ]] ||
  fail "expected clang-tidy 14, got ${tidy:-none}. scripts/setup.sh --dev installs it."

# Of the arguments, which count from where the caller is: the sources, as CMake writes them, and whose
# findings count, where not all do.
sources=() wanted=()
for argument in "$@"; do
  [[ -e $argument ]] || fail "expected a source or a folder, got '$argument', which does not exist."
  mapfile -t found < <(find "$(realpath "$argument")" -name '*.cpp')
  ((${#found[@]} > 0)) ||
    fail "expected sources (.cpp) or folders of them, got '$argument'. A header is checked with the sources that include it."
  sources+=("${found[@]}")
  mapfile -t -O "${#wanted[@]}" wanted < <(find "$(realpath "$argument")" -name '*.cpp' -o -name '*.h')
done
cd "$root"

build=$root/build/tidy
mkdir -p "$build"
# Without precompiled headers, for clang cannot read GCC's.
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DDDP_PCH=OFF >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  fail "cmake cannot configure build/tidy. Its message is above."
}
# What is compiled at once: a generated source that includes up to ten of ours, or one of ours.
mapfile -t units < <(sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' "$build/compile_commands.json" | sort -u)
lines=()
if ((${#sources[@]} > 0)); then
  chosen=()
  for source in "${sources[@]}"; do
    unit=$(grep --files-with-matches --fixed-strings "#include \"$source\"" "${units[@]}" | head -n 1) ||
      unit=$(printf '%s\n' "${units[@]}" | grep --line-regexp --fixed-strings "$source") ||
      unit=""
    if [[ -z $unit ]]; then
      echo "tidy: ${source#"$root/"} is left out: no build on this machine has it" >&2
      continue
    fi
    chosen+=("$unit")
  done
  ((${#chosen[@]} > 0)) || fail "nothing is left to check."
  mapfile -t units < <(printf '%s\n' "${chosen[@]}" | sort -u)
  lines=("--line-filter=[$(printf '{"name":"%s"},' "${wanted[@]}")")
  lines=("${lines[0]%,}]")
fi

# Our headers, not those of LibTorch, wherever it lies. It counts the warnings it leaves out on stderr.
headers="^$(printf '%s' "$root" | sed 's/[][\.*^$+?(){}|]/\\&/g')/(benchmarks|comm|ddp|examples|launch|reducer|sampler|shard|tests|training)/"
printf '%s\0' "${units[@]}" |
  xargs -0 -n 1 -P "$(nproc)" "$tidy" -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option \
    --header-filter="$headers" "${lines[@]}" 2>"$build/errors.log" || {
  grep -v " warnings\{0,1\} generated\.$" "$build/errors.log" >&2 || true
  echo
  fail "the findings are above."
}
echo "tidy: ${#units[@]} compilations are clean"
