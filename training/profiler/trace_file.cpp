#include "trace_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>

#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <ddp/profiler.h>

namespace ddp {
namespace profiling {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string folder_above(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Returns the last characters of a file, without trailing blanks.
std::string end_of_file(std::ifstream& file) {
  file.seekg(0, std::ios::end);
  const auto size = static_cast<int64_t>(file.tellg());
  file.seekg(size < 16 ? 0 : size - 16);
  std::string end(16, ' ');
  file.read(end.data(), 16);
  return end.substr(0, end.find_last_not_of(" \n", static_cast<size_t>(file.gcount()) - 1) + 1);
}

}  // namespace

void check_trace_path(const std::string& path, const char* content) {
  DDP_CHECK_VALUE(
      !ends_with(path, ".gz"), "Profiler: expected a path of a ", content,
      " that does not end with .gz, got ", path, ". Export a plain file and compress it.");
  const auto folder = folder_above(path);
  DDP_CHECK(
      kind_of_path(folder) == PathKind::Folder, "Profiler: expected the folder of the ", content,
      ' ', path, ", got none. Make it first.");
  struct stat info {};
  DDP_CHECK_VALUE(
      stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode),
      "Profiler: expected a file to write the ", content, " to, got ", path,
      ", which is none. Name a file.");
}

void write_trace(const std::string& path, const std::function<void(const std::string&)>& write) {
  const auto part = path + '.' + unique_suffix();
  { const OutputFile file(part); }  // whose error has the cause
  remove_path(part);
  write(part);
  std::ifstream file(part, std::ios::binary);
  DDP_CHECK(
      file && ends_with(end_of_file(file), "}"), "Profiler: expected to write the whole trace ",
      path, ", but could not. Check whether the disk is full; the recording is lost.");
  rename_path(part, path);
}

void copy_trace(const std::string& from, const std::string& to) {
  std::ifstream in(from, std::ios::binary);
  DDP_CHECK(
      in, "Profiler: expected the trace ", from, ", which it exported before, to export it to ", to,
      ", got no such file. Copy the files once all are exported.");
  write_trace(
      to, [&](const std::string& part) { std::ofstream(part, std::ios::binary) << in.rdbuf(); });
}

}  // namespace profiling

std::function<void(Profiler&)> tensorboard_trace_handler(
    const std::string& folder, const std::string& worker_name) {
  return [folder, worker = worker_name](Profiler& profiler) mutable {
    make_folders(folder);
    if (worker.empty()) worker = ddp::str(host_name(), '_', getpid());
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    profiler.export_chrome_trace(ddp::str(folder, '/', worker, '.', ns, ".pt.trace.json"));
  };
}

}  // namespace ddp
