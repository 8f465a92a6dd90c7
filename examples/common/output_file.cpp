#include "output_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <c10/util/Exception.h>

namespace examples {
namespace {

bool is_folder(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

void check_can_write(const std::string& option, const std::string& path) {
  const std::string folder = folder_of(path);
  TORCH_CHECK_VALUE(
      is_folder(folder) && access(folder.c_str(), W_OK) == 0, option, " ", path,
      ": expected a folder to write to, got ", folder, ". Create it, or choose another.");
  TORCH_CHECK_VALUE(
      !is_folder(path), option, " ", path,
      ": expected the name of a file, got a folder. Add a name.");
}

void write_file(
    const std::string& path, const std::function<void(const std::string& part)>& write) {
  const std::string part = path + ".part." + std::to_string(getpid());
  try {
    write(part);
    TORCH_CHECK(
        std::rename(part.c_str(), path.c_str()) == 0, path, ": expected to rename ", part, ", got ",
        std::strerror(errno), ".");
  } catch (...) {
    std::remove(part.c_str());
    throw;
  }
}

}  // namespace examples
