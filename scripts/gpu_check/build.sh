# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# Builds the programs, or takes those of --build.

build_all() {
  if [[ $builds == no ]]; then
    use_carried_programs
    # Without programs and their archive a folder is a mistake of the command line, and each part says
    # what it misses.
    if [[ ! -f $build/$carried_file && (! -x $bin/ddprun || ! -x $bin/cuda_test) ]] || carried_programs_start; then
      note build skipped 0 "--no-build"
      return
    fi
    build=$root/build/gpu bin=$root/build/gpu/bin # those of --build stay as they are
    mkdir -p "$build"
  fi
  build_programs beside
}

build_programs() { # "beside": the rest is built beside what comes next; "" here
  local prefix
  prefix=$("${python:-false}" -c 'import torch; print(torch.utils.cmake_prefix_path)') || {
    note build failed 0 "no Python has torch: name one with --python"
    return 1
  }
  local configure=(cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release)
  configure+=("-DTorch_DIR=$prefix/Torch" -DDDP_WITH_CUDA=ON -DDDP_INSTALL=OFF)
  [[ -z $headers ]] || configure+=("-DCatch2_DIR=$headers/cmake" "-DCLI11_DIR=$headers/cmake")
  part configure 90 "${configure[@]}" "${cmake_arguments[@]}" || return
  local bound=$((seconds / 2))
  part "build of the ranks" "$bound" cmake --build "$build" --parallel "$jobs" \
    --target "${first_targets[@]}" -- -k 0
  # One source that does not compile shall not keep the rest from being built.
  ${1:+"$1"} part "build of the rest" "$bound" nice cmake --build "$build" --parallel "$jobs" \
    --target "${later_targets[@]}" -- -k 0
}
