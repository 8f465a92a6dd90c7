// Connections between the processes of a simulated job and its coordinator, and what ends them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "launch/simulator/process.h"

namespace ddp::testing {

/// Carries each message as its line, which arrives some ticks later, in order.
class Network {
 public:
  /// \param chance  like `processes`, shared with the other parts of the simulation.
  Network(Chance& chance, Processes& processes) : chance_(chance), processes_(processes) {}

  // A process's end.

  /// \return whether the process has a connection that it wanted.
  bool connect(Process& process);
  void follow_orders(Process& process);
  void receive(Process& process);
  /// The process has ended.
  void hang_up(const Process& process);

  // The coordinator's end.

  std::vector<int> connections() const;
  struct Arrival {
    std::optional<MemberMessage> message;  // nothing: the connection's end
  };
  /// The next that has arrived; nothing: not yet.
  std::optional<Arrival> take(int connection);
  void send(int connection, const CoordinatorMessage& message);
  void close(int connection);
  /// The coordinator has ended.
  void drop_all();

  // Events of the network.

  /// Loses the last lines of a connection that were on their way.
  ///
  /// \param side  0: both sides see it end. 1: only the process does, and lines that it sent come
  ///        late, if at all. 2: only the coordinator does.
  void break_connection(Process& process, int64_t side);
  /// Host 1 reaches neither the coordinator nor host 0.
  void cut_until(int64_t tick) { cut_until_ = tick; }
  bool is_cut(int host) const { return host == 1 && chance_.tick < cut_until_; }
  bool reaches(int host, int other) const { return host == other || chance_.tick >= cut_until_; }
  /// Without connections, and whole.
  void begin_again();

  int breaks() const { return breaks_; }

 private:
  struct Link {
    int pid = 0;
    int host = 0;
    Queue<std::optional<MemberMessage>> outbox;  // nothing: the end
    bool is_broken = false;                      // carries nothing any more
  };

  Link* whole_link_of(const Process& process);

  Chance& chance_;
  Processes& processes_;
  std::map<int, Link> links_;  // by connection
  int last_connection_ = 0;
  int64_t cut_until_ = 0;
  int breaks_ = 0;
};

}  // namespace ddp::testing
