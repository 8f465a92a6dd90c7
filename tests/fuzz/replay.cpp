// Runs every target on its corpus, without a fuzzer. replay CORPUS
#include <dirent.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "support/temporary_folder.h"
#include "targets.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (const auto& target : ddp::fuzz::targets()) {
    const auto folder = std::string(argv[1]) + "/" + target.name;
    const auto names = ddp::testing::names_in(folder);
    if (names.empty()) {
      std::fprintf(stderr, "FAILED: no corpus in %s\n", folder.c_str());
      return 1;
    }
    for (const auto& name : names) {
      std::ostringstream bytes;
      bytes << std::ifstream(folder + "/" + name, std::ios::binary).rdbuf();
      std::printf("%s %s\n", target.name.c_str(), name.c_str());
      std::fflush(stdout);
      target.run(bytes.str());
    }
  }
  return 0;
}
