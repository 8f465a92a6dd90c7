#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

namespace ddp {

/// Casts floating tensors, as `to(dtype)` does one: on a GPU by few kernels for all of them, each
/// with a node of its own in autograd's graph.
std::vector<at::Tensor> cast_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype);

/// Finds moments at which other threads than the training one may read parameters: when a backward
/// pass begins, and when nothing has been trained for half a second.
///
/// Thread safety: the owner's mutex guards all members; each function is called while it is held.
class ParameterReaders {
 public:
  /// The values that parameters hold: the originals, or the casts of a pass.
  enum class Phase { Original, Forward, Backward };
  using Lock = std::unique_lock<std::mutex>;
  /// The parameters' versions, which an optimizer's step raises.
  using Versions = c10::function_ref<std::vector<int64_t>()>;

  Phase phase() const { return phase_; }
  void enter(Phase phase);

  /// Whether this thread ran the last forward pass, or constructed this object, if none has run.
  bool is_training_thread() const { return training_thread_ == std::this_thread::get_id(); }
  /// A forward pass begins on this thread. Where another thread ran the last one, waits for a
  /// pause.
  ///
  /// \throws c10::Error  a pass of another thread runs, or begins during that wait.
  void check_thread(Lock& lock);
  void set_training_thread() { training_thread_ = std::this_thread::get_id(); }

  /// Waits until every waiting reader has read. Call it at the begin of a backward pass: there no
  /// optimizer steps, and no forward pass changes a buffer.
  void let_others_read(Lock& lock);

  /// As LowPrecisionParameters::read().
  void read(Lock& lock, Versions versions, c10::function_ref<void()> read);

 private:
  using Clock = std::chrono::steady_clock;

  bool wait_for_pause(Lock& lock);

  Phase phase_ = Phase::Original;
  uint64_t phase_changes_ = 0;
  Clock::time_point last_change_{};
  std::thread::id training_thread_ = std::this_thread::get_id();
  int waiting_ = 0;             // threads in read()
  bool reads_allowed_ = false;  // the training thread waits for the readers
  std::condition_variable changed_;
};

/// Replaces parameters by their casts to a low precision while forward and backward passes use
/// them, and restores the originals for any other time.
///
/// The tensor objects stay the same, so modules and optimizers keep holding them: each gets the
/// data and the graph edge of its cast, so that gradients flow from the cast to the parameter.
/// Autograd saves the tensor objects for backward, not their data. So when a backward pass reaches
/// an output of a forward pass, the parameters get that pass's casts again. Each parameter is
/// restored before its gradient accumulates, and all are when the backward pass ends or fails.
///
/// Python's wrapper replaces the data alone, and parameters stay in low precision from forward to
/// the end of the averaged backward pass, if one follows.
///
/// Memory: the casts, as long as the outputs of the forward pass exist, and at least until the next
/// forward pass.
/// Threads: one thread trains; others use read(). A thread that reads the parameters directly may
/// get the casts.
class LowPrecisionParameters : public std::enable_shared_from_this<LowPrecisionParameters> {
 public:
  /// Returns the value that a tensor has outside of a pass: for a parameter the original, for any
  /// other tensor that tensor.
  using ValueOf = std::function<at::Tensor(const at::Tensor&)>;

  /// \param parameters  leaves, each once. Those that are not floating are not replaced.
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  /// Begins a forward pass. Where another thread ran the last one, waits until no pass has begun or
  /// ended for half a second. Does nothing inside a backward pass, where the casts are in place
  /// already.
  ///
  /// \throws c10::Error  a pass of another thread runs, or begins during that wait.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs);
  /// Ends a forward pass that threw, or whose outputs have no graph.
  void abandon_forward() noexcept;

  /// Restores the parameters that a backward pass has not used. Called once it needs no casts any
  /// more, and at its end.
  void end_backward() noexcept;

  /// Calls `read` with values of one moment between two steps of the optimizer. Calls it again
  /// where a parameter changed during the call: the last call counts.
  ///
  /// Threads: any. Blocks: on the training thread, no. On another thread, until
  ///   - a backward pass begins, whose thread waits until `read` has returned; or
  ///   - for half a second no pass has begun or ended, and no parameter was written.
  ///
  /// \throws c10::Error  neither happens within ten minutes.
  void read(const std::function<void(const ValueOf&)>& read);
  /// Whether this thread may read the parameters without read(): it ran the last forward pass, or
  /// constructed this object, if none has run.
  bool may_read_directly() const;

  /// Calls `act` while the parameters have their originals, also inside a backward pass.
  ///
  /// \param act  must not call this object.
  void with_originals(c10::function_ref<void()> act);

  /// `tensors` with the originals in place of parameters that are replaced by casts at the moment.
  std::vector<at::Tensor> originals(std::vector<at::Tensor> tensors) const;

 private:
  /// The casts of one forward pass, by parameter; its outputs keep them alive.
  using Casts = std::vector<at::Tensor>;
  using CastsPtr = std::shared_ptr<Casts>;
  class OutputHook;
  class GradientHook;

  using Phase = ParameterReaders::Phase;

  void begin_backward(const CastsPtr& casts);
  at::Tensor value_of(const at::Tensor& tensor) const;
  std::vector<int64_t> versions() const;
  void substitute(const CastsPtr& casts);
  void substitute_one(size_t parameter);
  void restore(size_t parameter) noexcept;
  void restore_one(size_t parameter) noexcept;
  void restore_all() noexcept;
  void hook_accumulator(size_t parameter);

  const std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
  std::vector<at::Tensor> originals_;  // by parameter; undefined where it is not replaced
  CastsPtr casts_;                     // of the last forward pass
  CastsPtr in_place_;                  // those that replaced parameters last
  std::unordered_map<const void*, size_t> indices_;  // by TensorImpl
  ParameterReaders readers_;
  mutable std::mutex mutex_;  // protects the members above and replacing the parameters' data
};

}  // namespace ddp
