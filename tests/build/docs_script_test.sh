#!/usr/bin/env bash
# Runs scripts/docs.sh against stand-ins for doxygen and python3, so that it downloads nothing.
# usage: docs_script_test.sh <the repository>
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/repository/scripts" "$work/repository/docs/site"
cp "$1/scripts/docs.sh" "$work/repository/scripts"
echo mkdocs==1 >"$work/repository/docs/site/requirements.txt"
export work

fail() {
  echo "FAILED: $*"
  cat "$work/output"
  exit 1
}
expect_text() { grep -qF -- "$1" "$work/output" || fail "expected the output to contain: $1"; }
run_docs() { # STATUS
  local status=0
  PATH="$work/bin:$PATH" XDG_CACHE_HOME="$work/a cache" bash "$work/repository/scripts/docs.sh" \
    >"$work/output" 2>&1 || status=$?
  ((status == $1)) || fail "expected exit status $1, got $status"
}
expect_calls() {
  local calls
  mapfile -t calls <"$work/calls"
  [[ "${calls[*]}" == "$*" ]] || fail "expected the calls: $*; got: ${calls[*]}"
  : >"$work/calls"
}
: >"$work/calls"

cat >"$work/bin/doxygen" <<'END'
#!/usr/bin/env bash
echo doxygen >>"$work/calls"
[[ ! -e $work/doxygen-warns ]]
END
# `python3 -m venv DIR` makes a DIR whose python behaves as pip and mkdocs do.
cat >"$work/bin/python3" <<'END'
#!/usr/bin/env bash
mkdir -p "$3/bin"
cat >"$3/bin/python" <<'PYTHON'
#!/usr/bin/env bash
echo "$2" >>"$work/calls"
[[ ! -e $work/$2-fails && ($2 == pip || "$*" == *" --strict "*) ]]
PYTHON
chmod +x "$3/bin/python"
END
chmod +x "$work"/bin/*

touch "$work/pip-fails"
run_docs 1
expect_text "docs: pip could not install what docs/site/requirements.txt lists"
expect_calls pip
rm "$work/pip-fails"
run_docs 0
expect_text "docs: open $work/repository/build/site/index.html"
expect_calls pip doxygen mkdocs
run_docs 0
expect_calls doxygen mkdocs

# A changed list of packages.
echo mkdocs==2 >"$work/repository/docs/site/requirements.txt"
run_docs 0
expect_calls pip doxygen mkdocs

touch "$work/mkdocs-fails"
run_docs 1
expect_text "docs: repair the pages that are named above"
touch "$work/doxygen-warns"
: >"$work/calls"
run_docs 1
expect_text "docs: repair the docstrings that are named above"
expect_calls doxygen

echo "docs.sh: all as expected"
