# shellcheck shell=bash
# What the scripts that download data share. They source it, and set `folder`, where the data goes,
# and `mirrors`, the addresses to fetch from, in that order.

complain() {
  echo "${0##*/}: $*" >&2
}
die() {
  complain "$@"
  exit 1
}

has_sum() { # FILE SHA256
  [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$2" ]
}

# Goes on with FILE where it ends.
fetch() { # URL FILE
  if command -v curl >/dev/null; then
    curl --fail --location --silent --show-error --connect-timeout 20 --retry 2 \
      --continue-at - --output "$2" "$1"
  else
    wget --quiet --timeout=20 --tries=3 --continue --output-document="$2" "$1"
  fi
}

# Leaves NAME.part with the right checksum, or fails. A part that turns out wrong is dropped and
# fetched once more from the front; one that the network cut stays. One that the server refuses to go
# on from is set aside until it sends another: it may as well have refused for a reason of its own.
download() { # NAME SHA256
  local part="$folder/$1.part" aside="$folder/$1.aside" mirror url status
  for mirror in $mirrors; do
    url="$mirror/$1"
    for _ in resumed fresh; do
      has_sum "$part" "$2" && return
      echo "fetching $url"
      status=0
      fetch "$url" "$part" || status=$?
      if [ -s "$part" ]; then
        rm -f "$aside"
      elif [ -e "$aside" ]; then
        mv "$aside" "$part"
        break
      fi
      has_sum "$part" "$2" && return
      case $status in
        0)
          complain "$url: expected sha256 $2, got $(sha256sum "$part" | cut -d' ' -f1)"
          rm -f "$part"
          ;;
        8 | 22 | 33 | 36) # the server's answer: wget's 8, curl's others
          [ -s "$part" ] || break
          mv "$part" "$aside"
          ;;
        *) break ;;
      esac
    done
  done
  return 1
}

# The folder to use where the caller names none: NAME in the cache.
default_folder() { # NAME
  local cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
  echo "${cache:+$cache/ddp/$1}"
}

# Makes `folder`, for the data set of that NAME.
prepare_folder() { # NAME
  [ -n "$folder" ] || die "no place for $1: name a folder, or set HOME or XDG_CACHE_HOME."
  command -v curl >/dev/null || command -v wget >/dev/null || die "needs curl or wget; found neither."
  mkdir -p "$folder"
}
