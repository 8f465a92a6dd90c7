#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/process_group.h>

namespace ddp {

/// A generation of an elastic job: its members, and where the state comes from.
struct GenerationForm {
  int64_t number = 0;
  int rank = 0;                     // of this process
  std::vector<int> slots;           // by rank
  std::vector<uint64_t> processes;  // by rank; of each start of a program another number
  std::vector<int>
      sources;          // ranks whose state counts; none: that of the start, or of a checkpoint
  int64_t applied = 0;  // of the sources
  int64_t turns = 0;
  bool is_source() const;
};

/// The state that a member has when a generation ends.
struct HeldState {
  enum class Kind { None, Whole, Torn } kind = Kind::None;
  int64_t applied = 0;
  int64_t turns = 0;
  std::string why = {};  // this rank's own reason to end the generation; "": a call of it failed
};

/// This process's part in an elastic job: what its coordinator says, and the group of each
/// generation.
///
/// A thread talks to the coordinator. When a generation ends, that thread aborts its groups, so
/// that what waits for them throws.
///
/// Threads: next() to why() and threw() on one; the others on any.
class Generations {
 public:
  struct Settings {
    std::string coordinator;  // "HOST:PORT/TOKEN"
    int slot = -1;            // -1: the coordinator chooses one
    ProcessGroupOptions group = {};
  };

  /// Begins to connect to the coordinator.
  ///
  /// \throws c10::ValueError  for an address that is none.
  explicit Generations(const Settings& settings);
  ~Generations();
  C10_DISABLE_COPY_AND_ASSIGN(Generations);

  /// Waits for the coordinator's answer, as the next two.
  ///
  /// \throws QuorumLost  if it cannot be reached, or refuses this process.
  int slot() const;
  /// The number of ranks of the job, with all its slots.
  int size() const;
  /// Whether others train already.
  bool joins() const;

  /// Reports, where the coordinator asks for it, and waits for the next generation.
  ///
  /// \return nothing: this process has left, or the job is done.
  /// \throws Fenced, QuorumLost.
  std::optional<GenerationForm> next(const HeldState& held);

  /// Connects to the members.
  ///
  /// \return the group; empty where the generation has ended meanwhile.
  ProcessGroup meet(const GenerationForm& form);
  /// This process has the state, and trains.
  void entered();

  /// Whether the generation has ended, or this process's part in it.
  bool has_ended() const;
  /// Whether a collective of the generation threw on this rank.
  bool has_thrown() const;
  /// Whether ranks wait to join, or one leaves: pause at the boundary that all agree on.
  bool change_is_wanted() const;

  /// Stands at that boundary; next() goes on.
  void pause();
  /// This process is at the end of its training.
  void done();
  /// \return false: the generation has ended, and the others may need this process's state.
  bool wait_until_all_are_done();
  /// Why the last generation ended.
  std::string why() const;
  void leave();
  /// This process's work is done: where the coordinator cannot be reached for so long, next()
  /// throws QuorumLost, and wait_until_all_are_done() returns true.
  void set_coordinator_patience(std::chrono::milliseconds limit);
  /// Ends this process's part without a word: what waits for other ranks, or for the coordinator,
  /// throws.
  void disconnect_without_reply();
  /// This process leaves because of an exception.
  void threw(int64_t applied, const std::string& why);

 private:
  struct Impl;
  const std::shared_ptr<Impl> impl_;
};

/// Makes a group for a process that has not met the other ranks yet: every other rank answers as
/// this one would. So a program can make its model and its wrapper before it joins ranks that
/// train.
///
/// A sum is this rank's value times the size, a broadcast leaves the tensor as it is, gathering
/// gives `size` copies. A rank of it has no peer to send to: send, recv and scatter throw, and so
/// does making further groups of it. Of tensors of the CPU and of the backend's devices: there the
/// current stream does it.
///
/// \param backend  of the ranks that train, as in ProcessGroupOptions.
ProcessGroup make_mirror_group(
    int rank, int size, std::chrono::milliseconds timeout, const std::string& backend = "shm");

/// The meaning of ProcessGroupOptions' backend() for an elastic job.
struct GenerationBackends {
  bool carries_cpu = false;   // tensors of the CPU, in which ranks exchange what they tell
  bool picks_device = false;  // each rank has a device of its own, as over NCCL
};

/// \throws c10::ValueError  as init_process_group.
GenerationBackends generation_backends(const std::string& backend);

/// Makes this process's own device the calling thread's current one, where a backend of the options
/// picks one: so a process that joins has it before it makes its model, as others by their group.
///
/// \return  why there is none; "" where there is, where none is picked, and where the program
///          selects it.
std::string take_own_device(const ProcessGroupOptions& options);

/// Ends it: later calls throw RankLost.
void end_mirror_group(const ProcessGroup& group);

}  // namespace ddp
