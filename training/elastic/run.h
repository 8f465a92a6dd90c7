#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/elastic.h>
#include <ddp/internal/membership/generations.h>

#include "elastic/device_end.h"
#include "elastic/part.h"
#include "elastic/snapshots.h"
#include "elastic/transfer.h"

namespace ddp {

/// The implementation of Elastic: turns, and what comes between two generations.
struct Elastic::Impl {
  explicit Impl(const ElasticOptions& given);
  ~Impl();

  void enter();
  bool begin_turn();
  void step(const std::function<void()>& apply);
  void recover();
  bool finish();
  void leave();
  /// Whether a turn that ended with this exception can be repeated.
  bool can_recover_from(const std::exception_ptr& error) const;
  /// The exception leaves the loop.
  void leave_by(const std::exception_ptr& error) noexcept;
  void add(elastic::Part part);

  /// Where the training thread is.
  enum class At {
    Start,     // not in enter() yet
    Boundary,  // between two turns
    Turn,      // in a turn, before its step
    Apply,     // in a step: an exception leaves the state torn
    Stepped,   // in a turn, after its step
    Left,      // no rank any more
  };

  const ElasticOptions options;
  std::unique_ptr<Generations> generations;  // null: a fixed world
  std::vector<elastic::Part> parts;
  Checkpointer* checkpointer = nullptr;
  std::vector<std::function<void(const ElasticGeneration&)>> on_change;
  At at = At::Start;
  elastic::Progress progress;
  bool has_state = false;  // false in a process that joins others
  ElasticGeneration generation;
  ProcessGroup group;

 private:
  void end_turn();
  void undo_turn();
  bool has_ended_on_devices();
  bool enter_next();
  void check_failures(const GenerationForm& form);
  void begin_generation(const GenerationForm& form);
  void take_state(const GenerationForm& form);
  void take_state_of_others(const GenerationForm& form);
  void rebind_parts();
  void load_checkpoint(bool has_to);
  /// Whether parts are cut over ranks that may be lost.
  bool goes_back_to_snapshots() const;
  bool is_snapshot_due() const;
  void settle_shards(bool are_kept);
  bool pauses_for_change();
  void seed_generators() const;
  void set_group(ProcessGroup next);
  HeldState held() const;
  void describe(const GenerationForm& form);

  /// How often one turn failed in generations that no rank left and none joined.
  struct Failures {
    int64_t steps = -1;  // before the turn
    int64_t turns = -1;
    int64_t times = 0;
    std::string first;  // cause
  };

  std::optional<GenerationForm> form;  // that this process has not begun yet
  std::vector<uint64_t> processes;     // of the generation, by rank
  bool is_mirror = false;
  elastic::DeviceEnd device_end;  // of a generation's collectives
  elastic::Snapshots snapshots;   // of a run with parts that are cut
  int64_t repeated = 0;
  std::string vote_text;    // of the turn that failed by a vote; "": another reason
  bool has_failed = false;  // a turn on this rank, since the generation began
  Failures failures;
  int64_t saved_step = 0;
  std::chrono::steady_clock::time_point interrupted;
};

}  // namespace ddp
