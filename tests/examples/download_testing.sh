# shellcheck shell=bash
# Helpers of the tests of the download scripts. A test sources this file, with the script's path in
# $1: $work then has a copy of the script, whose checksums the test replaces by those of small
# stand-ins, and folders that serve as mirrors.
script=$1
if ! command -v curl >/dev/null; then # wget knows no file:// mirrors
  echo "skipped: no curl"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
copy=$work/copy.sh good=$work/good bad=$work/bad cut=$work/cut folder=$work/data
mkdir "$good" "$bad" "$cut"
cp "$script" "$copy"
cp "$(dirname "$script")/download.sh" "$work"

sum() { sha256sum "$1" | cut -d' ' -f1; }
fail() {
  echo "FAILED: $*" >&2
  cat "$work/log" >&2
  exit 1
}
fetched() { grep -c '^fetching' "$work/log" || true; }

# Puts all but the first 1000 bytes of FILE into the mirror $cut, and those bytes into the partial
# file of a download: only a script that continues the partial file succeeds with that mirror.
cut_download() { # FILE
  cp "$good/$1" "$cut"
  head -c 1000 /dev/zero | dd of="$cut/$1" conv=notrunc status=none
  mkdir -p "$folder"
  head -c 1000 "$good/$1" >"$folder/$1.part"
}
