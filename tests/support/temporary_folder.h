#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace ddp::testing {

// POSIX, not std::filesystem: LibTorch's libraries export an older copy of its functions, which a
// program that links them gets instead of its own and crashes in.

/// Lists the names in a folder, in no order.
inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* entries = opendir(folder.c_str());
  if (entries == nullptr) return names;
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(entries);
  return names;
}

/// Removes a file, or a folder with all it holds.
inline void remove_all(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    for (const auto& name : names_in(path)) remove_all(path + "/" + name);
  }
  std::remove(path.c_str());
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Where tests write: $TMPDIR, or memory where there is enough, or /tmp.
///
/// Checkpoints are synchronised with the disk, and a disk that others fill takes a minute for that.
inline std::string temporary_base() {
  const char* chosen = getenv("TMPDIR");
  if (chosen != nullptr) return chosen;
  struct statvfs memory {};
  const bool is_there =
      statvfs("/dev/shm", &memory) == 0 && access("/dev/shm", R_OK | W_OK | X_OK) == 0;
  const auto free_bytes = static_cast<uint64_t>(memory.f_bavail) * memory.f_frsize;
  return is_there && free_bytes >= (uint64_t{4} << 30) ? "/dev/shm" : "/tmp";
}

/// A folder of its own, removed with all it holds when the test ends.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    path_ = temporary_base() + "/ddp-test-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + path_);
  }
  ~TemporaryFolder() { remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

  /// Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(file(name), std::ios::binary) << bytes;
    return file(name);
  }

 private:
  std::string path_;
};

}  // namespace ddp::testing
