# CLI11, for the command lines of ddprun and of the programs; a project around may have brought its own.
if(NOT TARGET CLI11::CLI11)
  find_package(CLI11 CONFIG QUIET)
  if(NOT CLI11_FOUND)
    message(FATAL_ERROR "CLI11 was not found, which ddprun reads its arguments with. One of these gives it:\n"
      "  scripts/setup.sh                             with apt-get\n"
      "  apt-get install libcli11-dev\n"
      "  -DCMAKE_PREFIX_PATH=/path                    where its sources were installed by cmake --install\n")
  endif()
endif()
