// Files for streams, beside those of lines.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/temporary_folder.h"

namespace ddp::testing {

/// Runs GNU's tar in a folder.
inline void run_tar(const std::string& folder, const std::string& arguments) {
  const auto command = "cd '" + folder + "' && tar " + arguments;
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// Tar files as WebDataset writes them, of samples "0", "1", ... with two files each.
inline std::vector<std::string> tar_files(
    const TemporaryFolder& folder, const std::vector<int>& sizes, const std::string& flags = "") {
  std::vector<std::string> archives;
  int next = 0;
  for (const int size : sizes) {
    std::string names;
    for (int i = 0; i < size; ++i, ++next) {
      const auto key = "sample" + std::to_string(next);
      folder.write(key + ".txt", std::string(static_cast<size_t>(next) * 31 % 700, 'x'));
      folder.write(key + ".cls", std::to_string(next));
      names += " " + key + ".txt " + key + ".cls";
    }
    archives.push_back(folder.file("shard" + std::to_string(archives.size()) + ".tar"));
    run_tar(folder.path(), "c" + flags + "f " + archives.back() + names);
  }
  return archives;
}

/// Files of the tokens 0, 1, ...: as many in each as `sizes` says.
inline std::vector<std::string> token_files(
    const TemporaryFolder& folder, const std::vector<int>& sizes) {
  std::vector<std::string> files;
  int next = 0;
  for (const int size : sizes) {
    std::string bytes;
    for (int i = 0; i < size; ++i, next += 271) {
      bytes += static_cast<char>(next & 255);
      bytes += static_cast<char>(next >> 8 & 255);
    }
    files.push_back(folder.write("tokens" + std::to_string(files.size()) + ".bin", bytes));
  }
  return files;
}

}  // namespace ddp::testing
