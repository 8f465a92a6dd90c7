# shellcheck shell=bash disable=SC2154 # variables are gpu_check.sh's
# Packs for a machine without a network: headers that it cannot install, and programs that it
# need not build.

# The folders of headers, with what CMake's find_package() looks for.
collect_headers() { # FOLDER
  local include
  for include in /usr/include /usr/local/include; do
    [[ -f $include/catch2/catch.hpp && -f $include/CLI/CLI.hpp ]] || continue
    mkdir -p "$1/include/catch2" "$1/include/CLI" "$1/cmake"
    cp "$include"/catch2/catch.hpp "$1/include/catch2"
    cp -r "$include"/CLI/. "$1/include/CLI"
    printf '#define CATCH_CONFIG_MAIN\n#include <catch2/catch.hpp>\n' >"$1/cmake/catch_main.cpp"
    cat >"$1/cmake/Catch2Config.cmake" <<'CMAKE'
if(NOT TARGET Catch2WithMain)
  add_library(Catch2WithMain STATIC ${CMAKE_CURRENT_LIST_DIR}/catch_main.cpp)
  target_include_directories(Catch2WithMain SYSTEM PUBLIC ${CMAKE_CURRENT_LIST_DIR}/../include)
  target_compile_definitions(Catch2WithMain PUBLIC DDP_CATCH2_V2)  # the compiler may find v3, too
  add_library(Catch2::Catch2WithMain ALIAS Catch2WithMain)
endif()
CMAKE
    cat >"$1/cmake/CLI11Config.cmake" <<'CMAKE'
if(NOT TARGET CLI11::CLI11)
  add_library(CLI11::CLI11 INTERFACE IMPORTED GLOBAL)
  target_include_directories(CLI11::CLI11 INTERFACE ${CMAKE_CURRENT_LIST_DIR}/../include)
endif()
CMAKE
    echo "gpu_check: headers of Catch2 and CLI11 are in $1"
    return
  done
  fail "--collect: expected catch2/catch.hpp and CLI/CLI.hpp in /usr/include, found none. Install them."
}

# Packs the programs of the check without what only debuggers read. One that is a link to another
# stays a link: the worlds of the tests are one file. Programs that lie unpacked in the folder are older
# ones, and as large as all else that travels.
collect_programs() { # FOLDER
  local folder=$logs program path file
  mkdir "$folder/bin"
  for program in "${all_programs[@]}"; do
    path=$bin/$program
    [[ -x $path ]] || fail "--collect: expected the program '$program' in '$bin', found none. Leave out --no-build."
    file=$(basename "$(readlink -f "$path")")
    # A stripped program keeps the symbols that the libraries look for in a program.
    strip -o "$folder/bin/$file" "$path" 2>/dev/null || cp -L "$path" "$folder/bin/$file"
    chmod +x "$folder/bin/$file"
    [[ $file == "$program" ]] || ln -sf "$file" "$folder/bin/$program"
  done
  [[ $1/bin -ef $bin ]] || rm -rf "${1:?}/bin"
  tar -C "$folder" -cJf "$1/$carried_file" bin || fail "--collect: '$1/$carried_file' could not be written"
  echo "gpu_check: programs are packed in $1/$carried_file, $(du -h "$1/$carried_file" | cut -f 1)"
}

# Unpacks the archive of programs beside it, as a whole or not at all. A small image may lack xz, which
# tar starts; Python's lzma needs no program.
unpack_programs() {
  tar -C "$build" -xJf "$build/$carried_file" 2>/dev/null ||
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2])' \
      "$build/$carried_file" "$build" || rm -rf "$bin"
}

# Programs that were made elsewhere look for LibTorch where it was there: this machine's goes before.
use_carried_programs() {
  local libraries folder
  [[ -d $bin || ! -f $build/$carried_file ]] || unpack_programs
  libraries=$("${python:-false}" -c 'import os, torch; print(os.path.dirname(torch.__file__) + "/lib")' 2>/dev/null) ||
    return 0
  for folder in "$libraries" "${libraries%/torch/lib}"/nvidia/*/lib; do
    [[ -d $folder ]] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
  done
  export LD_LIBRARY_PATH
}

# Whether the programs are there and load: their C and C++ libraries and LibTorch fit.
carried_programs_start() {
  part "programs from elsewhere: ddprun" 20 "$bin/ddprun" --help &&
    part "programs from elsewhere: cuda_test" 60 "$bin/cuda_test" --help
}
