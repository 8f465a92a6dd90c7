#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace ddp {

/// Parameters that are their own casts to a low precision while forward and backward passes use
/// them, and what they were at any other time.
///
/// The tensors stay the same, wherever modules and optimizers hold them: they get the data of the
/// cast and its place in the graph, so that autograd leads from there to the parameters. Autograd
/// saves for backward the tensors, not their data; so they become the casts of that forward pass
/// again when a backward pass reaches what it returned. Each is itself again before its gradient
/// accumulates, and all are when the backward pass ends, or fails.
///
/// Python's wrapper exchanges the data alone, and parameters stay in low precision from forward to
/// the end of the averaged backward pass, if one comes.
///
/// Memory: the casts, as long as the outputs of the forward pass live, and at least until the next
/// forward pass.
/// Threads: one trains; others use read(). One that uses the parameters themselves meets the casts.
class LowPrecisionParameters : public std::enable_shared_from_this<LowPrecisionParameters> {
 public:
  /// What a tensor is outside of a pass: for a parameter itself in its own precision, for any other
  /// tensor that one.
  using ValueOf = std::function<at::Tensor(const at::Tensor&)>;

  /// \param parameters  leaves, each once. Those that are not floating stay as they are.
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  /// A forward pass begins. Nothing inside a backward pass, where they are in low precision.
  ///
  /// \throws c10::Error  while another thread's pass goes on.
  void begin_forward();
  /// It returned `outputs`.
  void end_forward(const std::vector<at::Tensor>& outputs);
  /// It threw, or what it returned has no graph.
  void abandon_forward() noexcept;

  /// Calls `read` while no value changes, perhaps several times: what the last call saw is of one
  /// moment between two steps of the optimizer. From any thread.
  ///
  /// Blocks: on the training thread no; on another until a backward pass begins, whose thread waits
  /// for it, or until no pass has begun and nothing has been written for a while.
  ///
  /// \throws c10::Error  where something writes parameters without pause for ten minutes, and runs
  ///         no backward pass.
  void read(const std::function<void(const ValueOf&)>& read);
  /// Whether no other thread has run a forward pass since this one did.
  bool are_of_this_thread() const;

  /// In place of those that casts stand in for now, what they are at any other time.
  std::vector<at::Tensor> originals(std::vector<at::Tensor> tensors) const;

 private:
  /// Of one forward pass, as long as its outputs live; by parameter.
  using Casts = std::vector<at::Tensor>;
  using CastsPtr = std::shared_ptr<Casts>;
  class OutputHook;
  class GradientHook;
  class BackwardEnd;

  enum class Phase { Original, Forward, Backward };

  void check_thread() const;
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
  std::vector<at::Tensor> originals_;  // of those that are substituted; by parameter
  Phase phase_ = Phase::Original;
  CastsPtr casts_;                                   // of the last forward pass
  std::unordered_map<const void*, size_t> indices_;  // by TensorImpl
  std::thread::id trainer_;                          // that ran the last forward pass
  int waiting_ = 0;                                  // threads in read()
  bool is_resting_ = false;                          // the training thread lets them read
  std::condition_variable changed_;
  mutable std::mutex mutex_;  // of all above, and of what the parameters are
};

}  // namespace ddp
