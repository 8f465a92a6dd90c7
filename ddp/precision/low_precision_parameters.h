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

namespace ddp {

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

  /// Begins a forward pass. Does nothing inside a backward pass, where the casts are in place
  /// already.
  ///
  /// \throws c10::Error  if a pass of another thread runs, or one of it begins while this call
  /// waits
  ///         until half a second has passed since the last.
  void begin_forward();
  /// Ends a forward pass that returned `outputs`.
  void end_forward(const std::vector<at::Tensor>& outputs);
  /// Ends a forward pass that threw, or whose outputs have no graph.
  void abandon_forward() noexcept;

  /// Calls `read` while no value changes, perhaps several times: the values of the last call are
  /// all of one moment between two steps of the optimizer. From any thread.
  ///
  /// Blocks: on the training thread no; on another until a backward pass begins, whose thread waits
  /// for the reader, or until no pass has begun and nothing has been written for half a second.
  ///
  /// \throws c10::Error  if parameters are written without pause for ten minutes, and no backward
  ///         pass runs.
  void read(const std::function<void(const ValueOf&)>& read);
  /// Whether this thread may read the parameters without read(): it ran the last forward pass, or
  /// constructed this object, if none has run.
  bool may_read_directly() const;

  /// `tensors` with the originals in place of parameters that are replaced by casts at the moment.
  std::vector<at::Tensor> originals(std::vector<at::Tensor> tensors) const;

 private:
  /// The casts of one forward pass, by parameter; its outputs keep them alive.
  using Casts = std::vector<at::Tensor>;
  using CastsPtr = std::shared_ptr<Casts>;
  class OutputHook;
  class GradientHook;
  class BackwardEnd;

  enum class Phase { Original, Forward, Backward };
  using Clock = std::chrono::steady_clock;

  bool is_training_thread() const { return training_thread_ == std::this_thread::get_id(); }
  void check_thread(std::unique_lock<std::mutex>& lock);
  void enter(Phase phase);
  bool wait_for_pause(std::unique_lock<std::mutex>& lock);
  void begin_backward(const CastsPtr& casts);
  void let_others_read(std::unique_lock<std::mutex>& lock);
  at::Tensor value_of(const at::Tensor& tensor) const;
  std::vector<int64_t> versions() const;
  void end_backward() noexcept;
  void substitute(const Casts& casts);
  void restore(size_t parameter) noexcept;
  void restore_one(size_t parameter) noexcept;
  void restore_all() noexcept;
  void hook_accumulator(size_t parameter);

  const std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
  std::vector<at::Tensor> originals_;  // by parameter; undefined where it is not replaced
  Phase phase_ = Phase::Original;
  uint64_t phase_changes_ = 0;
  Clock::time_point last_change_{};
  CastsPtr casts_;                                   // of the last forward pass
  std::unordered_map<const void*, size_t> indices_;  // by TensorImpl
  // Ran the last forward pass, or will run the first.
  std::thread::id training_thread_ = std::this_thread::get_id();
  int waiting_ = 0;             // threads in read()
  bool reads_allowed_ = false;  // the training thread waits for the readers
  std::condition_variable changed_;
  mutable std::mutex mutex_;  // protects the members above and replacing the parameters' data
};

}  // namespace ddp
