#pragma once

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/fd.h"
#include "launch/hosts/line_socket.h"
#include "launch/options.h"

namespace ddp::launch {

/// Node 0's half of the agreement between the hosts of a job: a thread that decides when an attempt
/// starts, when it ends, and whether another one follows. The `Host` of every host connects to it,
/// also node 0's own. The lines, in order:
///
///   host         join NODE NODES RANKS MAX_RESTARTS
///   coordinator  refuse TEXT                         and the host leaves
///   coordinator  start ATTEMPT MASTER_PORT           once all hosts have joined, or ended
///   host         ended CODE RESTARTABLE              its ranks have ended
///   coordinator  end                                 a host's ranks have failed: end yours
///   coordinator  finish CODE TEXT                    no other attempt follows
class Coordinator {
 public:
  /// \throws std::system_error  when the endpoint's port is taken.
  explicit Coordinator(const LaunchOptions& options);
  /// Waits for the thread, which ends once it has sent all hosts how the job ended.
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

 private:
  struct Failure {
    int code;
    bool restartable;
    std::string text;  // empty: the host itself reports the failure
  };

  void run();
  bool gather_hosts();
  void admit_host(LineSocket host);
  std::optional<Failure> run_attempt();
  std::optional<Failure> take_report(size_t node);
  void send_to_all(const std::string& line);

  const LaunchOptions options_;
  Fd listener_;
  Pipe stop_;                      // closing it stops gather_hosts
  std::vector<LineSocket> hosts_;  // by node rank; empty: has not joined
  std::vector<bool> running_;      // by node rank; whether the host is still in the attempt
  std::thread thread_;
};

}  // namespace ddp::launch
