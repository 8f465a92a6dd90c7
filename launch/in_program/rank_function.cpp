#include "launch/in_program/rank_function.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <utility>

#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <ddp/internal/ranges.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

std::vector<int> open_descriptors() {
  std::vector<int> result;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    const int fd = std::atoi(entry->d_name);  // 0 for "." and ".."
    if (fd != ::dirfd(folder.get())) result.push_back(fd);
  }
  return result;
}

std::string name_of_process() {
  char name[16] = {};
  ::prctl(PR_GET_NAME, name);
  return name;
}

void replace_environment(const Environment& environment) {
  ::clearenv();
  for (const auto& entry : environment) {
    const auto sign = entry.find('=');
    if (sign == std::string::npos) continue;
    ::setenv(entry.substr(0, sign).c_str(), entry.c_str() + sign + 1, 1);
  }
}

}  // namespace

/// A text in memory that processes share; what does not fit is cut off.
struct RankFunction::Text {
  void append(std::string_view more) {
    const auto count = std::min(more.size(), sizeof(bytes) - size);
    std::memcpy(bytes + size, more.data(), count);
    size += count;
  }
  std::string text() const { return {bytes, size}; }

  bool is_set;
  size_t size;
  char bytes[(size_t{1} << 16) - 2 * sizeof(size_t)];
};

/// The texts of exceptions follow it, one for each rank.
struct RankFunction::Shared {
  Text& thrown(int rank) { return reinterpret_cast<Text*>(this + 1)[rank]; }

  bool has_ended;
  int code;
  bool has_failed;
  Failure failure;
  Text notes;
};

void flush_streams() {
  try {
    for (auto* stream : {&std::cout, &std::cerr, &std::clog}) stream->flush();
  } catch (const std::exception&) {
    // A stream of which the program asked for exceptions; its reader is gone.
  }
  std::fflush(nullptr);
}

RankFunction::RankFunction(std::function<void(int)> body, int ranks)
    : body_(std::move(body)),
      size_(sizeof(Shared) + static_cast<size_t>(ranks) * sizeof(Text)),
      shared_(static_cast<Shared*>(::mmap(
          nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1,
          0))),
      descriptors_(open_descriptors()),
      name_(name_of_process()) {
  if (shared_ == MAP_FAILED) throw_errno("cannot get memory that processes share");
  ::sigprocmask(SIG_SETMASK, nullptr, &blocked_);
  ::sigaction(SIGCHLD, nullptr, &on_child_);
  ::sigaction(SIGPIPE, nullptr, &on_pipe_);
}

RankFunction::~RankFunction() { ::munmap(shared_, size_); }

void RankFunction::run(int rank, const Environment& environment) const {
  int code = 0;
  auto& thrown = shared_->thrown(rank);
  try {
    restore();
    replace_environment(environment);
    // A pipe's buffer would hold lines back, as the terminal of a program that starts does not.
    if (::isatty(STDOUT_FILENO) == 1) std::setvbuf(stdout, nullptr, _IOLBF, 0);
    body_(rank);
  } catch (const std::exception& error) {
    thrown.is_set = true;
    thrown.append(error.what());
    code = 1;
  } catch (...) {
    thrown.is_set = true;
    thrown.append("an exception that is no std::exception");
    code = 1;
  }
  flush_streams();
  // Not exit(): what the program has for its end is for the process that called spawn, and threads
  // of LibTorch still run.
  ::_exit(code);
}

/// Brings back what this process's ancestors have changed since the object was made.
void RankFunction::restore() const {
  // The launcher's own descriptors would keep the others' ends of its pipes open.
  for (const int fd : open_descriptors()) {
    if (fd > STDERR_FILENO && !contains(descriptors_, fd)) ::close(fd);
  }
  ::prctl(PR_SET_NAME, name_.c_str());
  ::sigaction(SIGCHLD, &on_child_, nullptr);
  ::sigaction(SIGPIPE, &on_pipe_, nullptr);
  ::sigprocmask(SIG_SETMASK, &blocked_, nullptr);
}

void RankFunction::begin_attempt() {
  const auto last = failure();
  if (const auto text = last ? thrown(last->rank) : std::nullopt) {
    note(str("rank ", last->rank, " threw: ", *text));
  }
  shared_->has_failed = false;
  const auto texts = (size_ - sizeof(Shared)) / sizeof(Text);
  for (int rank = 0; rank < static_cast<int>(texts); ++rank) {
    shared_->thrown(rank).is_set = false;
    shared_->thrown(rank).size = 0;
  }
}

void RankFunction::note(std::string_view line) {
  shared_->notes.append(line);
  shared_->notes.append("\n");
}

void RankFunction::note_failure(const Failure& failure) {
  if (std::exchange(shared_->has_failed, true)) return;
  shared_->failure = failure;
}

void RankFunction::note_end(int code) {
  shared_->code = code;
  shared_->has_ended = true;
}

std::optional<int> RankFunction::code() const {
  return shared_->has_ended ? std::optional<int>(shared_->code) : std::nullopt;
}

std::optional<RankFunction::Failure> RankFunction::failure() const {
  return shared_->has_failed ? std::optional<Failure>(shared_->failure) : std::nullopt;
}

std::vector<std::string> RankFunction::notes() const { return lines_of(shared_->notes.text()); }

std::optional<std::string> RankFunction::thrown(int rank) const {
  const auto& thrown = shared_->thrown(rank);
  return thrown.is_set ? std::optional<std::string>(thrown.text()) : std::nullopt;
}

}  // namespace ddp::launch
