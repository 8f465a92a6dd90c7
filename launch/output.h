#pragma once

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <poll.h>

#include "launch/fd.h"
#include "launch/sink.h"

namespace ddp::launch {

/// Carries to ddprun's stdout and stderr what the ranks write to theirs, and what ddprun says.
///
/// Nothing here blocks. A reader that is slower than the ranks slows them down: their output is
/// not read while too much waits to be written.
class Output {
 public:
  /// \param out_fd, err_fd  where the ranks' stdout and stderr go, and with the latter what ddprun
  ///        itself says.
  Output(int out_fd, int err_fd);

  /// The descriptors that a rank shall have as its stdout and stderr: pseudo-terminals, so that
  /// lines come as they are written and none is lost with the rank; of the width that
  /// is left after the prefix. Pipes where the system has no pseudo-terminal.
  struct RankEnds {
    Fd out;
    Fd err;
  };
  /// Makes those of the next local rank; call it for each, in order.
  ///
  /// \param log  a file that gets the rank's lines as well, without prefix; may be empty.
  RankEnds add_rank(int global_rank, Fd log = {});

  /// Queues one line of ddprun's own for stderr, after what the ranks have written there.
  void say(std::string_view line);

  /// Moves whatever can be moved now, from the ranks and to the readers.
  void copy();

  /// Takes over the size of the terminal that is written to, if any.
  void resize();

  /// Takes what a rank that has ended left, and ends its last lines.
  void drain(int local_rank);

  /// Appends what to wait for until `copy` has something to do.
  void add_to(std::vector<pollfd>& waited) const;

  /// Whether all that was queued is written.
  bool flushed() const { return out_.empty() && err_.empty(); }

  /// errno of a failed write (EPIPE: the reader went away), or 0.
  int error() const { return out_.error() != 0 ? out_.error() : err_.error(); }
  /// errno of a failed write to a log, or 0. The job goes on.
  int log_error() const;

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
  };
  Fd add_stream(Sink& sink, int global_rank, Log* log);
  static void finish(Stream& stream);
  /// Reads what is there, up to `limit` bytes.
  static void read_ready(Stream& stream, size_t limit);
  static void resize(const Stream& stream);

  Sink out_;
  Sink err_;
  // Where stderr goes: out_ when both are one file (2>&1, a terminal), lest one's line be written
  // into the middle of the other's.
  Sink* err_sink_;
  int own_source_;
  std::vector<std::unique_ptr<Log>> logs_;  // of the ranks that have one
  std::vector<Stream> streams_;  // stdout and stderr of local rank 0, of local rank 1, ...
};

}  // namespace ddp::launch
