#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/membership/line_channel.h>
#include <poll.h>

#include "launch/job/job.h"
#include "launch/job/ports.h"
#include "launch/options.h"
#include "launch/pipe.h"

namespace ddp::launch {

/// Keeps the state that a coordinator needs after a restart. One process at a time may have it.
class StateFile {
 public:
  /// \throws std::runtime_error  when another process has it, or it cannot be made.
  explicit StateFile(std::string path);

  /// \return nothing when there is none.
  /// \throws std::runtime_error  when it is something else.
  std::optional<Remembered> read() const;
  /// Replaces it as a whole, with its name on the disk when it returns.
  /// \throws std::runtime_error  when it cannot be written.
  void write(const Remembered& state) const;
  void remove() const;

 private:
  const std::string path_;
  Fd lock_;
};

/// Carries lines between a job and its clients, and passes the time to the job. It works inside of
/// the caller's poll loop.
///
/// Strangers may connect: a client has 10 seconds for its first line, and for each line from its
/// first byte on. Of clients that have not sent a line, 64 are kept; the oldest ones make room.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  using LineChannel = membership::LineChannel;

  /// \param port  to listen on, of all addresses, or of this host alone where the job has no other
  ///        one; 0: a free one. Without one it has only clients of this process.
  /// \throws std::system_error  when the port is taken, or the state cannot be read.
  Coordinator(const LaunchOptions& options, const std::string& token, std::optional<int> port);

  /// 0: it does not listen.
  int port() const { return port_; }
  /// The end of a new client of this process.
  LineChannel local_client();
  std::optional<int> exit_code() const { return job_->exit_code(); }

  void add_to(std::vector<pollfd>& waited) const;
  /// When serve() has something to do without a descriptor that is ready.
  std::optional<Clock::time_point> next_time() const;
  /// Does all that can be done without waiting.
  void serve();
  /// Sends what is left, for at most 2 seconds.
  void finish_sending();

 private:
  struct Client {
    LineChannel channel;
    std::optional<Clock::time_point> line_due;  // the first line, or one that has come in part
    bool spoke = false;
  };

  Job::Wires wires(bool is_alone);

  bool may_accept() const;
  size_t count_silent() const;
  void accept_clients();
  void read_lines_of(int name);
  void make_room();
  void drop_if_ended(int name);
  std::chrono::milliseconds now() const;

  Fd listener_;
  int port_ = 0;
  Clock::time_point next_accept_{};
  bool is_full_ = false;  // of descriptors
  const Clock::time_point start_ = Clock::now();
  std::map<int, Client> clients_;
  int last_name_ = 0;
  std::optional<StateFile> state_file_;
  std::optional<ReservedPort> reserved_;
  std::optional<Job> job_;
};

}  // namespace ddp::launch
