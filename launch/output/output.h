#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <poll.h>

#include "launch/output/line_mux.h"
#include "launch/pipe.h"

namespace ddp::launch {

/// Writes the ranks' lines to a descriptor of ddprun's own, and never blocks.
///
/// The descriptor is shared with the process that started ddprun, so it is not made non-blocking. A
/// pipe that poll calls writable takes PIPE_BUF bytes at once, so writes are no larger than that.
class Sink {
 public:
  /// Lines are plain where `fd` is no terminal.
  explicit Sink(int fd);

  int add_source(std::string prefix) { return lines_.add_source(std::move(prefix)); }
  void feed(int source, std::string_view bytes);
  void finish(int source);

  /// Writes as much as the reader takes now.
  void write_ready();

  int fd() const { return fd_; }
  bool empty() const { return written_ == pending_.size(); }
  /// Whether the caller has to stop feeding until the reader has caught up.
  bool full() const { return pending_.size() - written_ > kMaxPending; }
  /// errno of a failed write, or 0. After a failed write all further bytes are dropped.
  int error() const { return error_; }

 private:
  static constexpr size_t kMaxPending = size_t{1} << 20;

  void drop_if_broken();

  int fd_;
  LineMux lines_;
  std::string pending_;
  size_t written_ = 0;  // bytes of pending_
  int error_ = 0;
};

/// Opens `<log_dir>/attempt_<n>/rank_<r>.log`, with the folders that it needs. A file of an earlier
/// job is replaced.
///
/// \return empty without a log_dir.
/// \throws std::system_error  naming the file or folder that cannot be made.
Fd open_log(const std::string& log_dir, int attempt, int global_rank);

/// Copies the ranks' output, and ddprun's own lines, to ddprun's stdout and stderr.
///
/// Nothing here blocks. A reader that is slower than the ranks slows them down: their output is not
/// read while too much waits to be written.
class Output {
 public:
  /// Takes one line, without its end.
  using Lines = std::function<void(std::string_view)>;
  /// \param out_fd  receives the ranks' stdout.
  /// \param err_fd  receives the ranks' stderr, and ddprun's own lines.
  /// \param own_lines  takes ddprun's own lines in the place of err_fd; may be empty.
  Output(int out_fd, int err_fd, Lines own_lines = {});

  /// The descriptors for a rank's stdout and stderr. They are pseudo-terminals, as wide as the
  /// terminal less the prefix, so that lines come as they are written and none is lost with the
  /// rank. They are pipes where the system has no pseudo-terminal.
  struct RankEnds {
    Fd out;
    Fd err;
  };
  /// Makes the descriptors of one rank more.
  ///
  /// \param log  a file that gets the rank's lines as well, without prefix; may be empty.
  /// \throws std::system_error  when no descriptors are left; the rank has no place then.
  RankEnds add_rank(int global_rank, Fd log = {});

  /// Takes bytes, and returns those that go on.
  using Filter = std::function<std::string(std::string_view)>;
  /// Makes the descriptors of a ddprun on another host, whose lines have their prefixes.
  ///
  /// \param filter  of its stdout; may be empty.
  RankEnds add_launcher(Filter filter);

  /// Queues one line of ddprun's own for stderr, after the ranks' lines there; or gives it to
  /// `own_lines`.
  void say(std::string_view line);

  /// Copies all that can be copied now, from the ranks and to the readers.
  void copy();

  /// Passes the size of ddprun's terminal, if it has one, on to the ranks.
  void resize();

  /// Reads the rest of the output of a rank that has ended, and ends its last lines.
  ///
  /// \param place  of its add_rank() among all: 0, 1, ...
  void drain(int place);

  /// Appends the descriptors to wait for until `copy` has something to do.
  void add_to(std::vector<pollfd>& waited) const;

  /// Reads the rest of all ranks' output, and writes it at the reader's pace.
  ///
  /// \param others   descriptors that end a wait, too.
  /// \param goes_on  called before each wait; false: the rest is dropped.
  void write_rest(const std::vector<pollfd>& others, const std::function<bool()>& goes_on);

  /// Whether all queued bytes are written.
  bool flushed() const { return out_.empty() && err_.empty(); }

  /// errno of a failed write (EPIPE: the reader went away), or 0.
  int error() const { return out_.error() != 0 ? out_.error() : err_.error(); }
  /// errno of a failed write to a log, or 0. The job continues.
  int log_error() const { return log_error_; }

 private:
  struct Log {
    explicit Log(Fd file) : fd(std::move(file)), sink(fd.get()) {}
    Fd fd;
    Sink sink;
  };
  struct Stream {
    Fd fd;  // empty once its writers are gone
    Sink* sink;
    int source;
    int prefix_width;
    Log* log;  // null: none
    int log_source;
    Filter filter;  // may be empty
  };
  struct Rank {
    std::unique_ptr<Log> log;  // null: none
    std::vector<Stream> streams;
  };
  static Fd add_stream(Rank& rank, Sink& sink, const std::string& prefix, Filter filter = {});
  void forget_ended();
  static void finish(Stream& stream);
  /// Reads what is there, up to `limit` bytes.
  static void read_ready(Stream& stream, size_t limit);
  static void resize(const Stream& stream);

  Sink out_;
  Sink err_;
  // The sink of stderr: out_ when both are one file (2>&1, a terminal), or a line of one could be
  // written into the middle of a line of the other.
  Sink* err_sink_;
  int own_source_;
  Lines own_lines_;
  std::map<int, Rank> ranks_;  // by place; not those whose output has ended
  int next_place_ = 0;
  int log_error_ = 0;  // of a log that is closed
};

}  // namespace ddp::launch
