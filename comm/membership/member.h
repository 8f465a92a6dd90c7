#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ddp/internal/membership/lines.h>

namespace ddp::membership {

/// A process's part in an elastic job, beside `launch::Membership`.
///
/// A pure state machine: events and calls in, orders out. It has no socket, no thread, and no
/// clock: each event carries the time, which must not go back.
class Member {
 public:
  using Time = std::chrono::milliseconds;  // since any moment

  using Stage = membership::Stage;

  struct Send {
    MemberMessage message;
  };
  /// Connect, again and again, on a thread that does not keep the events from here.
  struct Connect {};
  struct Disconnect {};
  /// Abort all groups: what waits for them throws.
  struct Stop {
    std::string why;
  };
  using Order = std::variant<Send, Connect, Disconnect, Stop>;

  enum class Ending { None, Left, Fenced, Failed };
  struct End {
    Ending how = Ending::None;
    int code = 0;
    std::string why;
  };

  /// \param hello  what this process says first; its slot may be -1.
  Member(Hello hello, Time now);

  // From the connection.
  void on_connected(Time now);
  void on_disconnected(Time now);
  void on_message(Time now, const CoordinatorMessage& message);
  void on_time(Time now);
  Time next_time() const;

  // From the training. Each is ignored where the stage has changed meanwhile.
  void ready();
  void report(int64_t generation, int64_t applied, int64_t turns, Holding holding);
  void store(const std::string& address);
  void met(int64_t generation);
  void entered(int64_t generation);
  /// The group of the generation failed. \param accused  who is to blame, as far as it is known.
  void lost(Time now, int64_t generation, std::vector<ProcessId> accused, const std::string& why);
  void threw(int64_t applied, const std::string& why);
  void pause(Time now, int64_t generation);
  void leave();
  void done(Time now, int64_t generation);
  /// This process's work is done: from here on it waits at most `limit` for a coordinator that
  /// cannot be reached. A process that is Done has left then.
  void set_coordinator_patience(Time limit) { coordinator_patience_ = limit; }
  /// Ends without a word of the coordinator.
  void disconnect_without_reply();

  Stage stage() const { return stage_; }
  const std::optional<You>& you() const { return you_; }
  /// The number of the last `gather` or `form`.
  int64_t generation() const { return generation_; }
  const Form& form() const { return form_; }
  const std::string& store_address() const { return store_; }
  /// Whether a process waits or leaves: pause at the boundary that all agree on.
  bool change_is_wanted() const { return change_; }
  /// Where members of other hosts reach this host; "": as this process itself does.
  const std::string& reached_at() const { return reached_at_; }
  const std::string& why() const { return why_; }
  const End& end() const { return end_; }
  ProcessId id() const { return hello_.id; }
  bool is_connected() const { return connected_; }

  bool has_orders() const { return !orders_.empty(); }
  std::vector<Order> take_orders() { return std::exchange(orders_, {}); }

 private:
  void take(Time now, const You& you);
  void take(Time now, const Reached& reached);
  void take(Time now, const Change& change);
  void take(Time now, const Gather& gather);
  void take(Time now, const Form& form);
  void take(Time now, const Reform& change);
  void take(Time now, const Store& store);
  void take(Time now, const Fenced& fenced);
  void take(Time now, const membership::End& end);
  void introduce();
  void resend_state();
  void connect_again(Time now);
  void finish(Ending how, int code, const std::string& why);
  void send(const MemberMessage& message);
  bool waits_for_coordinator() const;
  Time longest_wait() const;

  Hello hello_;
  Stage stage_ = Stage::Starting;
  std::optional<You> you_;
  int64_t generation_ = 0;
  Form form_;
  std::string store_;
  Report report_;  // the last ones, for a coordinator that did not get them
  Lost lost_;
  std::string reached_at_;
  bool change_ = false;
  bool leaves_ = false;
  std::optional<Time> coordinator_patience_;
  std::string why_;
  End end_;
  bool connected_ = false;
  Time heard_;  // from the coordinator; while there is no connection: when it ended
  Time next_alive_;
  std::vector<Order> orders_;
};

}  // namespace ddp::membership
