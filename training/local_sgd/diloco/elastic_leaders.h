#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/diloco.h>
#include <ddp/internal/membership/generations.h>
#include <ddp/process_group.h>

#include "local_sgd/diloco/leaders.h"

namespace ddp {

/// A region's state that another one takes when it joins: all but the parameters.
struct OuterState {
  int64_t round = 0;
  at::Tensor outer;
  at::Tensor momentum;
  std::string parts;
};

/// Where a region begins that joins others: with their state before an exchange, and its mean.
struct Joined {
  OuterState state;
  int64_t step = 0;  // inner steps that the others had taken when they began it
  int64_t fragment = 0;
  at::Tensor mean;
  std::chrono::steady_clock::time_point watched;  // when the exchange was over
};

/// Leaders that may be lost and join, as members of a coordinator's job of their own.
///
/// A thread belongs to the slow link. The leaders' threads tell each other some times a second what
/// they wait for, in a gather of some numbers: a *tick*. An exchange begins in the tick in which
/// all regions have called for it. Until then no collective waits for a region that still takes its
/// steps, so regions can join, and a lost one is left out, while the others train.
///
/// A difference is kept until its mean is here, so an exchange that failed is repeated without the
/// region that was lost. Where some leaders had its mean already, they give it to the others.
///
/// A region that joins watches the next exchange, without a part in its mean, and then gets the
/// state before it, in pieces between ticks; the others train on meanwhile.
class ElasticLeaders final : public Leaders {
 public:
  struct Settings {
    std::string coordinator;
    ProcessGroupOptions group;
    DiLoCoWire wire = DiLoCoWire::Float32;
    std::string text;                               // the same in all regions
    std::vector<int64_t> fragment_sizes;            // elements
    std::chrono::milliseconds leaves_within{5000};  // for the others to let this region go
  };

  /// Begins to meet the other regions. Where all begin, `outer` becomes that of the first.
  ElasticLeaders(Settings settings, at::Tensor outer);
  /// Leaves: the others go on without this region. Waits for them for some seconds.
  ~ElasticLeaders() override;

  std::shared_future<void> met() const { return met_future_; }
  /// Once it is: whether this region joins others that train, and joined() comes before its first
  /// exchange.
  bool joins() const { return joins_; }
  std::shared_future<Joined> joined() const { return joined_future_; }
  /// Whether regions watch, and this one is to offer them its state before its next exchange.
  bool gives_state() const { return gives_state_; }
  /// Offers copies of the state before the next exchange.
  void offer(OuterState state);

  std::shared_future<at::Tensor> exchange(Difference difference) override;
  void drop(const std::shared_future<at::Tensor>& mean) noexcept override;
  int64_t bytes_sent() const override { return bytes_sent_; }
  double seconds_sent() const override { return seconds_sent_; }
  /// The slots of those of the last exchange.
  std::vector<int64_t> regions() const;

  /// This region is at the end of its training.
  ///
  /// \return  ready once all regions are.
  std::shared_future<void> finish();

 private:
  using Clock = std::chrono::steady_clock;

  /// A leader's message in a tick.
  struct Note {
    int64_t is_ready, round, step, fragment;  // of the exchange that it waits for
    int64_t waits_ms;                         // since when
    int64_t has_state, is_finished, wants_change;
    int64_t bytes_to_send;  // of a state, to those that watch
    int64_t piece;          // of it, that is sent next
  };
  struct Wanted {
    Difference difference;
    std::promise<at::Tensor> mean;
    Clock::time_point since;
  };
  struct Last {
    int64_t fragment = 0;
    at::Tensor mean;
  };

  void run();
  void begin();
  bool enter_next();
  void catch_up(const ProcessGroup& group, const GenerationForm& form);
  void begin_together(const std::vector<std::string>& settings, const ProcessGroup& group);
  void tick();
  Note own_note();
  std::vector<Note> gather_notes(const Note& own) const;
  void leave_if_too_late(const std::vector<Note>& notes) const;
  void exchange_with(const std::vector<Note>& notes);
  void send_piece(int source, const std::vector<Note>& notes);
  void receive_piece(int source, int64_t bytes);
  void choose_piece();
  void join();
  void drop_state();
  void end_with_others(bool has_state);
  void deliver(const Last& last);
  void end(const std::exception_ptr& error);

  const Settings settings_;
  Generations generations_;
  bool joins_ = false;  // set before met_

  // Members of the thread.
  at::Tensor outer_;  // that all begin with; undefined afterwards
  ProcessGroup group_;
  std::vector<int> slots_;
  bool has_state_ = false;
  bool is_over_ = false;
  int64_t exchanges_ = 0;  // that are over
  Last last_;
  std::optional<Joined> joining_;  // without its state
  std::string on_its_way_;         // a state to be sent, or what has come of one
  size_t sent_ = 0;
  int64_t piece_;
  Clock::time_point piece_began_;
  bool state_travels_ = false;              // from one region to others
  std::chrono::milliseconds join_took_{0};  // until this region has exchanged
  std::promise<void> met_;
  const std::shared_future<void> met_future_ = met_.get_future().share();
  std::promise<Joined> joined_;
  const std::shared_future<Joined> joined_future_ = joined_.get_future().share();

  mutable std::mutex mutex_;  // guards the next ones
  std::condition_variable changed_;
  std::optional<Wanted> wanted_;
  std::optional<OuterState> offered_;
  std::vector<int64_t> regions_;
  bool is_finished_ = false;
  bool stops_ = false;
  bool has_ended_ = false;  // the thread
  std::exception_ptr failure_;

  std::promise<void> finished_;
  const std::shared_future<void> finished_future_ = finished_.get_future().share();
  std::atomic<bool> gives_state_{false};
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<double> seconds_sent_{0};
  std::thread thread_;
};

}  // namespace ddp
