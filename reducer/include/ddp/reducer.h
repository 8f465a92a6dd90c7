#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/comm_hooks.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace torch::autograd {
struct Node;
}

namespace ddp {

class Bucket;
struct Problem;

/// A parameter and the name a user knows it by.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  /// Its gradients are sparse (an Embedding with `sparse=true`).
  bool expect_sparse = false;
};

/// Options of a `Reducer`; DistributedDataParallelOptions says what each means to a user.
struct ReducerOptions {
  /// Soft size of a bucket in MiB (2^20 bytes). Default: unset, 1 MiB and then 25 MiB
  TORCH_ARG(std::optional<double>, bucket_cap_mb) = {};
  /// Soft sizes of the first, second, ... bucket in MiB, the last repeating. Default: none
  TORCH_ARG(std::vector<double>, bucket_cap_mb_list) = {};
  /// A backward pass may skip parameters. Default: false
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// `.grad` aliases the bucket's memory after the first backward pass. Default: false
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
};

/// Turns each rank's gradients into the average over all ranks, while they are being computed.
///
/// A hook on every parameter's gradient accumulator tells the parameter's bucket. The last gradient
/// of a bucket makes it ready; ready buckets leave in launch order, each in one all-reduce (or
/// through the communication hook), while autograd goes on with earlier layers. When autograd is
/// done, one callback waits for the buckets, and every `.grad` is final when `backward()` returns
/// (on CUDA: in stream order).
///
/// What is reduced is the content of `.grad`: gradients accumulated locally before (no_sync) are
/// averaged with it. Gradients are divided by the world size before they are summed, so the sum
/// does not overflow where the average would not.
///
/// Errors that one rank meets during a backward pass (a parameter without gradient, a gradient of
/// the wrong dtype) do not stop its collectives: its part counts as zeros, and at the end of that
/// same backward every rank throws the same text. `.grad` is then unspecified, and the reducer can
/// be used again. An error of the group itself ends the reducer: later calls say so.
///
/// Ownership: keeps the parameters and their accumulators alive; the destructor removes the hooks.
/// Threads: hooks run on autograd's threads, one per device; everything else is called from the
///   training thread.
/// Collective: construction is not; the backward that prepare_for_backward() armed is, and so is
///   the one rebuild in prepare_for_forward().
/// Source: Li et al., "PyTorch Distributed", VLDB 2020 (arXiv:2006.15704), and the behaviour of
///   c10d::Reducer, torch 2.11.0. Unlike there, errors come at the backward that caused them, with
///   names, on every rank.
class Reducer {
 public:
  /// \param parameters  in registration order, each once; at least one; the same on every rank.
  /// \param group  the ranks to average over, with a backend for the parameters' devices.
  /// \throws c10::ValueError  for no parameters, an undefined one or one that needs no gradient,
  ///         and for bucket caps that are not positive.
  Reducer(
      std::vector<NamedParameter> parameters,
      ProcessGroup group,
      const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Called before a forward pass whose backward may be reduced. Once, when the first reduced
  /// backward has shown in which order gradients become ready, it rebuilds the buckets in rank 0's
  /// order.
  ///
  /// \throws c10::Error  when the last backward pass did not come to its end.
  ///
  /// Collective: in the one call that rebuilds (a broadcast of 8 bytes a parameter).
  void prepare_for_forward();

  /// Arms the reducer: the next backward pass is reduced. Without this call gradients accumulate
  /// locally. May be repeated before a backward pass.
  void prepare_for_backward();

  /// Replaces the averaging all-reduce. Once, before the first backward pass.
  ///
  /// \throws c10::Error  when a hook is there already, or a backward pass was reduced.
  void register_comm_hook(CommHook hook);

  /// Parameter indices per bucket, in launch order.
  std::vector<std::vector<size_t>> bucket_indices() const;
  /// Whether the buckets are in the order in which gradients become ready.
  bool has_rebuilt_buckets() const { return has_rebuilt_buckets_; }

 private:
  class GradientHook;

  enum class Phase {
    Local,     // gradients accumulate; hooks do nothing
    Armed,     // the next gradient begins a reduced backward pass
    Reducing,  // between the first gradient and the end of that backward pass
    Broken,    // the group failed in a collective: nothing can be reduced any more
  };

  // What the hook path knows of a parameter.
  struct Slot {
    size_t bucket = 0;
    bool ready = false;  // in this backward pass
  };

  void register_hooks();
  void build_buckets(std::vector<std::vector<size_t>> plan);
  void rebuild_buckets();
  void choose_status();
  bool records_ready_order() const;

  void on_gradient(size_t index);
  void begin_backward();
  void mark_ready(size_t index);
  void launch_ready_buckets();
  void launch(size_t index);
  void start_reducing(size_t index);
  void send_status();

  void finish_backward();
  void launch_unready_buckets();
  std::vector<at::Tensor> wait_for_buckets();
  static at::Tensor wait_for(Bucket& bucket);
  void throw_problems(bool known_to_all);
  std::vector<char> unused_everywhere(const at::Tensor& status) const;
  std::vector<char> pick(const std::vector<char>& by_parameter, const Bucket& bucket) const;
  void note_problem(Problem problem);
  // Runs `step`; when it throws, breaks off with a text that says what it was doing.
  template <typename Describe, typename Step>
  void or_break_off(const Describe& doing, const Step& step);
  [[noreturn]] void break_off(const std::string& doing, const std::string& cause);

  const std::vector<NamedParameter> parameters_;
  const ProcessGroup group_;
  const ReducerOptions options_;
  const std::vector<int64_t> caps_;

  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // by parameter
  std::vector<uintptr_t> hook_keys_;                                  // by parameter
  CommHook comm_hook_;

  std::atomic<Phase> phase_{Phase::Local};
  std::atomic<bool> callback_queued_{false};
  std::string broken_because_;

  std::vector<Slot> slots_;      // by parameter
  std::vector<Bucket> buckets_;  // in launch order
  size_t next_bucket_ = 0;       // the first that was not launched in this backward pass
  std::mutex launch_mutex_;      // taken once per bucket: each device has an autograd thread

  bool has_reduced_ = false;
  bool has_rebuilt_buckets_ = false;
  std::vector<size_t> ready_order_;  // of the first reduced backward pass
  std::atomic<size_t> ready_count_{0};

  // What this rank tells the others with every backward pass, summed over ranks: [0] how many
  // problems it met; then, with find_unused_parameters, whether each parameter had a gradient.
  at::Tensor status_;
  bool status_in_last_bucket_ = false;
  c10::intrusive_ptr<c10d::Work> status_work_;  // when no bucket carries it
  std::vector<char> used_;                      // by parameter, since the last reduced backward
  std::mutex problems_mutex_;
  std::vector<Problem> problems_;
};

}  // namespace ddp
