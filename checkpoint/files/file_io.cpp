#include <ddp/internal/file_io.h>

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/crc32c.h>
#include <ddp/internal/text.h>

#include "files/manifest.h"

namespace ddp {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;

std::string remedy_of(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "Free space there, or choose another folder.";
    case EACCES:
    case EPERM:
    case EROFS:
      return "Let this process write and read there, or choose another folder.";
    case ENOENT:
      return "Check whether somebody else removes or moves it.";
    case ENOTDIR:
    case EEXIST:
      return "Name a folder.";
    default:
      return "Check the file system.";
  }
}

[[noreturn]] void throw_system(const char* verb, const std::string& path, int error) {
  DDP_CHECK(
      false, path, ": expected to ", verb, " it, got \"", std::strerror(error), "\". ",
      remedy_of(error));
  std::abort();  // not reached
}

void check_system(bool succeeded, const char* verb, const std::string& path) {
  if (!succeeded) throw_system(verb, path, errno);
}

Fd open_path(const std::string& path, int flags, const char* verb) {
  Fd opened(open(path.c_str(), flags | O_CLOEXEC, 0666));
  check_system(bool(opened), verb, path);
  return opened;
}

struct stat info_of(const Fd& file, const std::string& path) {
  struct stat info {};
  check_system(fstat(file.get(), &info) == 0, "write", path);
  return info;
}

// Reads at most `size` bytes; fewer only at the end of the file.
size_t read_block(const Fd& file, void* data, size_t size, const std::string& path) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count =
        TEMP_FAILURE_RETRY(read(file.get(), static_cast<char*>(data) + done, size - done));
    check_system(count >= 0, "read", path);
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

constexpr size_t kMostAtOnce = size_t{1} << 30;  // read() takes no more than 2 GiB

void check_readable(bool succeeded, const std::string& path) {
  DDP_CHECK(
      succeeded, path, ": expected to read it, got \"", std::strerror(errno),
      "\". Check the path, and whether this process may read it.");
}

}  // namespace

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), file_(open_path(path_, O_WRONLY | O_CREAT | O_TRUNC, "create")) {}

void OutputFile::write(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count =
        TEMP_FAILURE_RETRY(::write(file_.get(), bytes, std::min(size, kBlockBytes)));
    check_system(count >= 0, "write", path_);
    sum_.crc32c = crc32c(sum_.crc32c, bytes, static_cast<size_t>(count));
    sum_.bytes += static_cast<uint64_t>(count);
    bytes += count;
    size -= static_cast<size_t>(count);
  }
}

FileSum OutputFile::finish(WaitUntil state) {
  if (state == WaitUntil::OnDisk) check_system(fsync(file_.get()) == 0, "write", path_);
  check_system(file_.reset(), "write", path_);
  return sum_;
}

AppendedFile::AppendedFile(std::string path)
    : path_(std::move(path)),
      // Without O_NONBLOCK, a pipe without a reader would stop the program here.
      file_(open_path(path_, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK, "open")) {}

bool AppendedFile::is_device() const { return !S_ISREG(info_of(file_, path_).st_mode); }

uint64_t AppendedFile::size() const {
  return is_device() ? 0 : static_cast<uint64_t>(info_of(file_, path_).st_size);
}

void AppendedFile::cut_to(uint64_t size) {
  check_system(
      TEMP_FAILURE_RETRY(ftruncate(file_.get(), static_cast<off_t>(size))) == 0, "write", path_);
}

void AppendedFile::append(const std::string& bytes) {
  if (info_of(file_, path_).st_nlink == 0) throw_system("find", path_, ENOENT);
  const auto before = size();
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = TEMP_FAILURE_RETRY(
        write(file_.get(), bytes.data() + done, std::min(bytes.size() - done, kBlockBytes)));
    if (count < 0) {
      const int error = errno;
      if (done > 0 && !is_device()) cut_to(before);
      throw_system("write", path_, error);
    }
    done += static_cast<size_t>(count);
  }
}

InputFile::InputFile(std::string path)
    : path_(std::move(path)), file_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  check_readable(bool(file_), path_);
  struct stat info {};
  check_readable(fstat(file_.get(), &info) == 0, path_);
  DDP_CHECK(S_ISREG(info.st_mode), path_, ": expected a file, got another thing. Name a file.");
  size_ = static_cast<uint64_t>(info.st_size);
}

void InputFile::read(uint64_t at, void* to, size_t bytes) const {
  auto* next = static_cast<char*>(to);
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = TEMP_FAILURE_RETRY(pread(
        file_.get(), next + done, std::min(bytes - done, kMostAtOnce),
        static_cast<off_t>(at + done)));
    check_readable(count >= 0, path_);
    DDP_CHECK(
        count > 0, path_, ": expected ", bytes, " bytes at byte ", at, ", got ", done,
        ", because another process shortened the file. Copy it again, and load it after that.");
    done += static_cast<size_t>(count);
  }
}

std::string unique_suffix() {
  std::random_device source;
  return ddp::str(hexadecimal(source()), hexadecimal(source()));
}

FileSum write_whole_file(const std::string& path, const std::string& bytes) {
  OutputFile file(path);
  file.write(bytes.data(), bytes.size());
  return file.finish();
}

void replace_file(
    const std::string& path, const std::function<void(OutputFile&)>& write, WaitUntil state) {
  const auto part = path + ".part." + unique_suffix();
  try {
    OutputFile file(part);
    write(file);
    file.finish(state);
    rename_path(part, path);
  } catch (...) {
    unlink(part.c_str());
    throw;
  }
}

std::string read_whole_file(const std::string& path, size_t max_bytes) {
  const auto file = open_path(path, O_RDONLY, "open");
  std::string bytes;
  std::vector<char> block(kBlockBytes);
  while (const size_t count = read_block(file, block.data(), block.size(), path)) {
    bytes.append(block.data(), count);
    DDP_CHECK(
        bytes.size() <= max_bytes, path, ": expected at most ", max_bytes,
        " bytes, got more. Check whether it is the right file.");
  }
  return bytes;
}

FileSum sum_of_file(const std::string& path) {
  const auto file = open_path(path, O_RDONLY, "open");
  std::vector<char> block(kBlockBytes);
  FileSum sum;
  while (const size_t count = read_block(file, block.data(), block.size(), path)) {
    sum.bytes += count;
    sum.crc32c = crc32c(sum.crc32c, block.data(), count);
  }
  return sum;
}

std::string folder_above(const std::string& path) {
  const auto slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string absolute_path(const std::string& path) {
  if (path.front() == '/') return path;
  std::array<char, PATH_MAX> folder{};
  check_system(getcwd(folder.data(), folder.size()) != nullptr, "find the folder of", path);
  return std::string(folder.data()) + "/" + path;
}

PathKind kind_of_path(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0) {
    return S_ISDIR(info.st_mode) ? PathKind::Folder : PathKind::File;
  }
  check_system(errno == ENOENT, "find", path);
  return PathKind::Nothing;
}

std::vector<std::string> names_in_folder(const std::string& path) {
  DIR* entries = opendir(path.c_str());
  check_system(entries != nullptr, "list", path);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int error = errno;
  closedir(entries);
  if (error != 0) throw_system("list", path, error);
  return names;
}

void make_folders(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const auto part = path.substr(0, slash);
    if (mkdir(part.c_str(), 0777) == 0) {
      sync_folder(folder_above(part));  // else its name, and all in it, may be lost with the power
    } else {
      const int error = errno;
      // For an existing folder of another user, mkdir may fail with another error than EEXIST.
      if (kind_of_path(part) != PathKind::Folder) throw_system("make", part, error);
    }
    if (slash == std::string::npos) return;
  }
}

bool is_name_in_folder(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name != "." && name != "..";
}

void sync_folder(const std::string& path) {
  const auto folder = open_path(path, O_RDONLY | O_DIRECTORY, "open");
  // Some file systems do not support this call for folders.
  check_system(fsync(folder.get()) == 0 || errno == EINVAL, "write", path);
}

void rename_path(const std::string& from, const std::string& to) {
  check_system(rename(from.c_str(), to.c_str()) == 0, "rename", from);
}

bool exchange_paths(const std::string& a, const std::string& b) {
  return renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

void remove_path(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0 && errno == ENOENT) return;
  if (S_ISDIR(info.st_mode)) {
    for (const auto& name : names_in_folder(path)) remove_path(path + "/" + name);
    check_system(rmdir(path.c_str()) == 0, "remove", path);
  } else {
    check_system(unlink(path.c_str()) == 0, "remove", path);
  }
}

}  // namespace ddp
