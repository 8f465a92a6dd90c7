#include "launch/output/log_file.h"

#include <cerrno>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>

namespace ddp::launch {
namespace {

/// Makes the folder, and those above it where they are missing.
void make_folder(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const auto folder = path.substr(0, slash);
    if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
      throw std::system_error(
          errno, std::generic_category(), "--log-dir: cannot make the folder '" + folder + "'");
    }
    if (slash == std::string::npos) return;
  }
}

}  // namespace

Fd log_of(const LaunchOptions& options, const Attempt& attempt, int global_rank) {
  if (options.log_dir.empty()) return {};
  const auto folder = options.log_dir + "/attempt_" + std::to_string(attempt.number);
  make_folder(folder);
  const auto path = folder + "/rank_" + std::to_string(global_rank) + ".log";
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) {
    throw std::system_error(
        errno, std::generic_category(), "--log-dir: cannot write '" + path + "'");
  }
  return file;
}

}  // namespace ddp::launch
