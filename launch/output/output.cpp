#include "launch/output/output.h"

#include <algorithm>
#include <cerrno>
#include <climits>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/poll_until.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr size_t kReadSize = size_t{1} << 16;  // the capacity of a pipe
// Limits how much is read of a dead rank's output, to which its children may still write.
constexpr size_t kDrainLimit = size_t{1} << 20;

bool same_file(int a, int b) {
  struct stat first;
  struct stat second;
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

/// Makes the folder, and those above it where they are missing.
void make_folder(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const auto folder = path.substr(0, slash);
    if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
      throw_errno("--log-dir: cannot make the folder '" + folder + "'");
    }
    if (slash == std::string::npos) return;
  }
}

}  // namespace

Sink::Sink(int fd)
    : fd_(fd), lines_(::isatty(fd) == 1 ? LineMux::For::Terminal : LineMux::For::File) {}

void Sink::feed(int source, std::string_view bytes) {
  lines_.feed(source, bytes, pending_);
  drop_if_broken();
}

void Sink::finish(int source) {
  lines_.finish(source, pending_);
  drop_if_broken();
}

void Sink::write_ready() {
  while (!empty()) {
    pollfd ready = {fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0) break;
    const size_t size = std::min<size_t>(pending_.size() - written_, PIPE_BUF);
    const ssize_t count = ::write(fd_, pending_.data() + written_, size);
    if (count >= 0) {
      written_ += static_cast<size_t>(count);
    } else if (errno != EAGAIN && errno != EINTR) {
      error_ = errno;
      drop_if_broken();
    } else {
      break;
    }
  }
  // Moving the rest to the front costs at most as much as was written since the last move.
  if (written_ >= pending_.size() - written_) {
    pending_.erase(0, written_);
    written_ = 0;
  }
}

void Sink::drop_if_broken() {
  if (error_ == 0) return;
  pending_.clear();
  written_ = 0;
}

Fd open_log(const std::string& log_dir, int attempt, int global_rank) {
  if (log_dir.empty()) return {};
  const auto folder = log_dir + "/attempt_" + std::to_string(attempt);
  make_folder(folder);
  const auto path = folder + "/rank_" + std::to_string(global_rank) + ".log";
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) throw_errno("--log-dir: cannot write '" + path + "'");
  return file;
}

Output::Output(int out_fd, int err_fd, Lines own_lines)
    : out_(out_fd),
      err_(err_fd),
      err_sink_(same_file(out_fd, err_fd) ? &out_ : &err_),
      own_source_(err_sink_->add_source("ddprun: ")),
      own_lines_(std::move(own_lines)) {}

Output::RankEnds Output::add_rank(int global_rank, Fd log_file) {
  Rank rank;
  if (log_file) rank.log = std::make_unique<Log>(std::move(log_file));
  const std::string prefix = "[" + std::to_string(global_rank) + "] ";
  RankEnds ends;
  ends.out = add_stream(rank, out_, prefix);
  ends.err = add_stream(rank, *err_sink_, prefix);
  ranks_[next_place_++] = std::move(rank);
  return ends;
}

Output::RankEnds Output::add_launcher(Filter filter) {
  Rank rank;
  RankEnds ends;
  ends.out = add_stream(rank, out_, "", std::move(filter));
  ends.err = add_stream(rank, *err_sink_, "");
  ranks_[next_place_++] = std::move(rank);
  return ends;
}

Fd Output::add_stream(Rank& rank, Sink& sink, const std::string& prefix, Filter filter) {
  auto terminal = make_pseudo_terminal();
  Pipe ends = terminal ? *std::move(terminal) : make_pipe();
  set_nonblocking(ends.read);
  const int source = sink.add_source(prefix);
  const int log_source = rank.log ? rank.log->sink.add_source("") : 0;
  rank.streams.push_back(
      {std::move(ends.read), &sink, source, static_cast<int>(prefix.size()), rank.log.get(),
       log_source, std::move(filter)});
  resize(rank.streams.back());
  return std::move(ends.write);
}

void Output::resize(const Stream& stream) {
  auto size = terminal_size(stream.sink->fd());
  if (!size || !stream.fd) return;
  size->ws_col = static_cast<unsigned short>(std::max(1, size->ws_col - stream.prefix_width));
  set_terminal_size(stream.fd, *size);
}

void Output::resize() {
  for (const auto& [place, rank] : ranks_) {
    for (const Stream& stream : rank.streams) resize(stream);
  }
}

void Output::say(std::string_view line) {
  if (own_lines_) return own_lines_(line);
  err_sink_->feed(own_source_, std::string(line) + "\n");
}

void Output::copy() {
  for (auto& [place, rank] : ranks_) {
    for (Stream& stream : rank.streams) {
      if (stream.fd && !stream.sink->full()) read_ready(stream, kReadSize);
    }
    if (rank.log) rank.log->sink.write_ready();
  }
  out_.write_ready();
  err_.write_ready();
  forget_ended();
}

/// A job may start its ranks again many times: their logs must not stay open.
void Output::forget_ended() {
  for (auto one = ranks_.begin(); one != ranks_.end();) {
    const auto& [place, rank] = *one;
    const bool is_open = std::any_of(
        rank.streams.begin(), rank.streams.end(),
        [](const Stream& stream) { return static_cast<bool>(stream.fd); });
    const bool is_written = !rank.log || rank.log->sink.empty();
    if (rank.log && log_error_ == 0) log_error_ = rank.log->sink.error();
    one = is_open || !is_written ? std::next(one) : ranks_.erase(one);
  }
}

void Output::drain(int place) {
  const auto rank = ranks_.find(place);  // without prefixes there is none
  if (rank == ranks_.end()) return;
  for (Stream& stream : rank->second.streams) {
    read_ready(stream, kDrainLimit);
    finish(stream);
  }
}

void Output::write_rest(const std::vector<pollfd>& others, const std::function<bool()>& goes_on) {
  for (const auto& [place, rank] : ranks_) drain(place);
  copy();
  while (!flushed() && goes_on()) {
    auto waited = others;
    add_to(waited);
    poll_until(waited);
    copy();
  }
}

void Output::finish(Stream& stream) {
  stream.sink->finish(stream.source);
  if (stream.log) stream.log->sink.finish(stream.log_source);
}

void Output::read_ready(Stream& stream, size_t limit) {
  char buffer[kReadSize];
  for (size_t total = 0; stream.fd && total < limit;) {
    const ssize_t count = ::read(stream.fd.get(), buffer, sizeof(buffer));
    if (count > 0) {
      const std::string_view bytes(buffer, static_cast<size_t>(count));
      stream.sink->feed(stream.source, stream.filter ? stream.filter(bytes) : std::string(bytes));
      if (stream.log) stream.log->sink.feed(stream.log_source, bytes);
      total += static_cast<size_t>(count);
    } else if (count == 0 || errno == EIO) {  // the end of a pipe, or of a pseudo-terminal
      finish(stream);
      stream.fd.reset();
    } else if (errno != EINTR) {
      return;  // nothing to read now
    }
  }
}

void Output::add_to(std::vector<pollfd>& waited) const {
  for (const auto& [place, rank] : ranks_) {
    for (const Stream& stream : rank.streams) {
      if (stream.fd && !stream.sink->full()) waited.push_back({stream.fd.get(), POLLIN, 0});
    }
  }
  for (const Sink* sink : {&out_, &err_}) {
    if (!sink->empty()) waited.push_back({sink->fd(), POLLOUT, 0});
  }
}

}  // namespace ddp::launch
