# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# The report, and the folder of results.

gpu_fields() { timeout 20 nvidia-smi "--query-gpu=$1" --format=csv,noheader 2>/dev/null | head -n 1; } # FIELDS

# A shared or hot GPU shows here.
note_clocks() { # WHEN
  local fields=clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used
  [[ $has_gpu == no ]] || echo "$1 the times, $fields: $(gpu_fields "$fields")" >>"$results/clocks.txt"
}

# A copy without .git has the commit that --collect wrote.
commit() {
  git -C "$root" describe --always --dirty --abbrev=12 2>/dev/null ||
    cat "$build/$commit_file" 2>/dev/null || cat "${headers:-$root/build/gpu_headers}/$commit_file" 2>/dev/null ||
    echo 'not a git checkout'
}

describe_machine() {
  local cpu gpu
  cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
  gpu=$(gpu_fields name,memory.total,driver_version)
  echo "Machine: $(nproc --all) x ${cpu:-unknown processor}, Linux $(uname -r)." \
    "GPU (memory, driver): ${gpu:-none}."
  echo "$("${python:-false}" -c 'import torch; n = getattr(torch.cuda, "nccl", None)
print(f"torch {torch.__version__}, CUDA {torch.version.cuda},",
      "NCCL", ".".join(map(str, n.version())) if n else "none", end=", ")' 2>/dev/null)" \
    "nvcc $(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')," \
    "$(c++ --version | head -n 1), $(cmake --version | head -n 1)." \
    "Sources: $(commit)."
}

write_report() {
  local name
  {
    printf "# GPU check\n\nOf \`scripts/gpu_check.sh\`, %s s.\n\n" "$SECONDS"
    echo "$machine"
    printf '\n%s of %s parts failed, and %s were skipped.\n' "$(failed | wc -l)" "$(rows)" "$(skipped | wc -l)"
    cat "$logs"/rows/* | sed -n 's/.*| \([a-z_]* was not built\) |$/\1/p' | sort | uniq -c |
      sed 's/^ *\([0-9]*\) \(.*\)/\n\2: \1 parts lack it./'
    while read -r name; do
      # It is what stands below; or a part that did not run.
      [[ $name != "$targets" && -s $(log_of "$name") ]] || continue
      printf '\n## %s: the end of its output\n\n```\n' "$name"
      tail -n 60 "$(log_of "$name")" 2>/dev/null | cut -c 1-400
      printf '```\n'
    done < <(failed | sed 's/^| \([^|]*\) |.*/\1/')
    printf '\n## Parts\n\n| part | result | s | why |\n| --- | --- | --- | --- |\n'
    cat "$logs"/rows/*
    if [[ -s $(log_of "$targets") ]]; then
      printf '\n'
      cat "$(log_of "$targets")"
    fi
    timeout 20 python3 "$root/benchmarks/report/gpu_page.py" "$results" 2>/dev/null
  } >"$output/gpu_check.md"
  keep_results
}

# All in one file, as some machines give back only a few: a folder of benchmarks/gpu, <GPU>-<date>, and
# in it the logs. The file is replaced as a whole, for this script may be ended while it writes.
keep_results() {
  local gpu folder packed=$logs/packed
  gpu=$(gpu_fields name | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' - | sed 's/-*$//')
  [[ $has_gpu == yes ]] || gpu=no-gpu
  rm -rf "$packed"
  folder=$packed/${gpu:-gpu}-$(date +%F)
  mkdir -p "$folder/logs"
  cp -r "$results/." "$output/gpu_check.md" "$folder"
  cp "$logs"/*.log "$folder/logs" 2>/dev/null
  printf '%s\n' "$machine" >"$folder/machine.txt"
  tar -C "$packed" -czf "$output/$results_file.part" . &&
    mv "$output/$results_file.part" "$output/$results_file"
}
