# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# The report, and the folder of results.

gpu_fields() { timeout 20 nvidia-smi "--query-gpu=$1" --format=csv,noheader 2>/dev/null | head -n 1; } # FIELDS

# A shared or hot GPU shows here.
note_clocks() { # WHEN
  local fields=clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used
  [[ $has_gpu == no ]] || echo "$1 the times, $fields: $(gpu_fields "$fields")" >>"$results/clocks.txt"
}

commit() { git -C "$root" describe --always --dirty --abbrev=12 2>/dev/null || echo 'not a git checkout'; }

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
    printf '\n%s of %s parts failed.\n' "$(failed | wc -l)" "$(rows)"
    while read -r name; do
      [[ $name != "$targets" ]] || continue # it is what stands below
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
  tar -C "$logs" -czf "$output/gpu_check_logs.tar.gz" .
  [[ $has_gpu == no ]] || keep_results
}

# As a folder of benchmarks/gpu: <GPU>-<date>.
keep_results() {
  local gpu folder
  gpu=$(gpu_fields name | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' - | sed 's/-*$//')
  folder=$output/${gpu:-gpu}-$(date +%F)
  rm -rf "$folder"
  cp -r "$results" "$folder"
  cp "$output/gpu_check.md" "$folder"
  printf '%s\n' "$machine" >"$folder/machine.txt"
}
