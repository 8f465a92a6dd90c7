// Files and folders by POSIX, not std::filesystem: LibTorch's libraries export an older copy of its
// functions, which a program that links them gets instead of its own and crashes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ddp/internal/system/fd.h>

namespace ddp {

/// The size and checksum by which a file is compared with the one that was written.
struct FileSum {
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
};

inline bool operator==(const FileSum& a, const FileSum& b) {
  return a.bytes == b.bytes && a.crc32c == b.crc32c;
}

/// Until when the end of a file's writing waits.
enum class WaitUntil {
  OnDisk,   // it outlives a loss of power; may take long while the disk is busy
  Written,  // it outlives the process
};

/// A new file that is written from its front.
class OutputFile {
 public:
  /// Creates the file, or empties an existing one.
  ///
  /// \throws c10::Error  with the path and the system's reason; so do all members.
  explicit OutputFile(std::string path);

  void write(const void* data, size_t size);

  FileSum finish(WaitUntil state = WaitUntil::OnDisk);

 private:
  std::string path_;
  Fd file_;
  FileSum sum_;
};

/// A file that grows by records, and may have some of an earlier run.
class AppendedFile {
 public:
  /// Opens the file, or creates it. Also takes a device, such as /dev/stdout.
  ///
  /// \throws c10::Error  with the path and the system's reason; so do all members.
  explicit AppendedFile(std::string path);

  const std::string& path() const { return path_; }
  /// The file's bytes; 0 for a device.
  uint64_t size() const;
  /// Makes it end after that many bytes.
  void cut_to(uint64_t size);
  /// Appends all bytes, or none: where only some can be written, they are cut off again. They may
  /// be lost with the power, not with the process. \throws  also where the file was removed.
  void append(const std::string& bytes);

 private:
  bool is_device() const;

  std::string path_;
  Fd file_;
};

/// A file of which ranges of bytes are read.
///
/// The ranges are copied and not mapped: a file that another process shortens meanwhile is an
/// error, where a mapping would end this process (SIGBUS) or show zeros.
///
/// All members throw c10::Error with the path and the reason.
class InputFile {
 public:
  explicit InputFile(std::string path);

  /// The file's bytes when it was opened.
  uint64_t size() const { return size_; }

  /// Reads `bytes` bytes, beginning with the byte `at`.
  void read(uint64_t at, void* to, size_t bytes) const;

 private:
  std::string path_;
  Fd file_;
  uint64_t size_ = 0;
};

/// Writes a whole file and returns once it is on the disk.
FileSum write_whole_file(const std::string& path, const std::string& bytes);

/// For names of files: differs from that of any other run, also of one that ended under this
/// process's number.
std::string unique_suffix();

/// Writes a file that appears whole or not at all: under another name, and then renamed to `path`.
///
/// \throws c10::Error, and the exceptions of `write`.
void replace_file(
    const std::string& path, const std::function<void(OutputFile&)>& write,
    WaitUntil state = WaitUntil::OnDisk);

/// A whole, small file.
///
/// \param max_bytes  a longer file is an error.
/// \throws c10::Error
std::string read_whole_file(const std::string& path, size_t max_bytes);

/// Reads a file to its end.
///
/// \throws c10::Error
FileSum sum_of_file(const std::string& path);

/// The path from the root, so that it names the same where the program goes to another working
/// folder. Touches no file. \throws c10::Error  the working folder is gone.
std::string absolute_path(const std::string& path);

std::string folder_above(const std::string& path);

enum class PathKind { Nothing, File, Folder };

/// \throws c10::Error  the system cannot answer: no permission, a file system that went away.
PathKind kind_of_path(const std::string& path);

/// Lists the names in a folder, in no order. \throws c10::Error
std::vector<std::string> names_in_folder(const std::string& path);

/// Makes a folder, and the folders above it that are missing. \throws c10::Error
void make_folders(const std::string& path);

/// Whether what has this name in a folder lies in it, and nowhere else: "../x" does not.
bool is_name_in_folder(const std::string& name);

/// Returns once the names in a folder are on the disk. \throws c10::Error
void sync_folder(const std::string& path);

/// Renames a file or a folder, onto nothing or onto a file. \throws c10::Error
void rename_path(const std::string& from, const std::string& to);

/// Exchanges the names of two folders, in one step.
///
/// \return false where the file system does not support it.
bool exchange_paths(const std::string& a, const std::string& b);

/// Removes a file, or a folder with all it holds. \throws c10::Error
void remove_path(const std::string& path);

}  // namespace ddp
