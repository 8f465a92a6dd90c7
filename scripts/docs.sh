#!/usr/bin/env bash
# Builds the site of the documentation in build/site, with the reference of the public headers.
# Fails on a docstring that Doxygen warns of, and on a page or link that mkdocs warns of.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "docs: $*" >&2
  exit 1
}

(($# == 0)) || fail "expected no arguments, got '$*'"
command -v doxygen >/dev/null ||
  fail "expected doxygen on PATH, got none. scripts/setup.sh --dev installs it."
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
[[ -n $cache ]] || fail "no place for mkdocs: set HOME or XDG_CACHE_HOME"

# mkdocs in a virtual environment, whose copy of the list of packages is written last.
packages=docs/site/requirements.txt
venv=$cache/ddp/docs
mkdir -p "$cache/ddp"
exec {lock}>"$cache/ddp/docs.lock"
flock "$lock"
if ! cmp --silent "$packages" "$venv/installed"; then
  echo "docs: installing mkdocs in $venv"
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --requirement "$packages" || fail "pip could not install what $packages lists"
  cp "$packages" "$venv/installed"
fi
exec {lock}>&-

# The plugin that makes pages of Doxygen's output does not pass its warnings on.
rm -rf build/doxygen build/mkdoxy
mkdir -p build
doxygen docs/site/Doxyfile || fail "repair the docstrings that are named above"
# Without the theme's advertisement of its successor.
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs --quiet build --strict \
  --config-file docs/site/mkdocs.yml || fail "repair the pages that are named above"
echo "docs: open $PWD/build/site/index.html"
