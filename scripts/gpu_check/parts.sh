# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# The parts of the check: each runs a command with a bound, and leaves a line for the report.

# A part is a line of the report's table: its name, what became of it, how long it took, and why.
# Each lies in a file of its own, for those that run in a shell of their own.
row=100
note() { # NAME RESULT SECONDS WHY
  printf '| %s | %s | %s | %s |\n' "$@" >"$logs/rows/$row"
  row=$((row + 1))
  echo "gpu_check: $1: $2${4:+ ($4)}, $3 s"
}
failed() { grep -hs '^| [^|]* | failed |' "$logs"/rows/*; }
skipped() { grep -hs '^| [^|]* | skipped |' "$logs"/rows/*; }
rows() { find "$logs/rows" -type f | wc -l; }

# Runs a part in a shell of its own, so many at a time.
beside() { # FUNCTION ARGUMENTS...
  while (($(jobs -pr | wc -l) >= together)); do wait -n; done
  (
    trap '[[ -z $child ]] || kill "$child"; exit 1' TERM
    "$@"
  ) &
  row=$((row + 1))
}
log_of() { echo "$logs/${1//[^A-Za-z0-9_.-]/_}.log"; } # NAME
left() { echo $((seconds - SECONDS)); }
# Notes a part that is left out where time runs short: with a GPU, as nothing takes long without.
has_time() { # NAME SECONDS
  [[ $has_gpu == no ]] || (($(left) >= $2)) && return
  note "$1" skipped 0 "left out: it needs $2 s, and $(left) s were left"
  return 1
}
# Prints a log's line about a failure, for a cell of the table: the first that looks like it, else the
# last.
reason_in() { # LOG
  local line
  line=$(grep -m 1 -E '^Missed: |failed: |what\(\): |error: ' "$1" ||
    grep -m 1 -E 'FAILED|[Ee]rror|ERROR' "$1" ||
    grep -v '^ *$' "$1" | tail -n 1)
  line=${line:0:300}
  echo "${line//|//}"
}

# Runs a command with a bound, its output to a log. A part without time left is skipped, and so is
# one that says that it has no GPU to run on, or a tool that the GPU is not one for it.
part() { # NAME SECONDS COMMAND...
  local name=$1 bound=$2 began=$SECONDS log status took
  log=$(log_of "$name")
  if (($(left) < 5)); then
    note "$name" skipped 0 "no time was left"
    return 1
  fi
  (($(left) >= bound)) || bound=$(left)
  timeout -k 5 "$bound" "${@:3}" >"$log" 2>&1 &
  child=$! # in the background, so that a signal ends it at once
  wait "$child"
  status=$?
  child=""
  took=$((SECONDS - began))
  if grep -q 'Device not supported' "$log"; then
    note "$name" skipped "$took" "the tool says: device not supported"
  elif ((status == 124 || status == 137)); then
    note "$name" failed "$took" "ended after $bound s"
  elif ((status != 0)); then
    note "$name" failed "$took" "status $status: $(reason_in "$log")"
  elif grep -q 'skipped: no CUDA device' "$log"; then
    note "$name" skipped "$took" "no CUDA device"
  else
    note "$name" passed "$took" ""
  fi
  return "$status"
}
# The same, of programs that the build made. With a GPU a part that lacks one has failed: a check that
# tested nothing shall not pass.
programs() { # NAME SECONDS PROGRAMS COMMAND...; PROGRAMS are the names of those that it needs
  local program result=skipped
  [[ $has_gpu == no ]] || result=failed
  for program in $3; do
    [[ -x $bin/$program ]] && continue
    note "$1" $result 0 "$program was not built"
    return 1
  done
  part "$1" "$2" "${@:4}"
}
# The same, of what says nothing of a GPU itself.
on_gpu() { # NAME SECONDS PROGRAMS COMMAND...
  if [[ $has_gpu == no ]]; then
    note "$1" skipped 0 "no CUDA device"
    return 1
  fi
  programs "$@"
}

# Adds the lines of JSON that a part printed to a file of results. Also of one whose modes ended with
# different parameters: that says so in the table of parts.
keep_lines() { # NAME FILE
  local lines
  lines=$(grep '^{' "$(log_of "$1")" 2>/dev/null) || return
  echo "$lines" >>"$results/$2"
}
