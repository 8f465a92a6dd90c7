#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/process_group.h>
#include <torch/custom_class.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::functional {

/// The result of an exchange that is on its way.
class PendingExchange {
 public:
  PendingExchange() = default;
  /// \param sent  stays alive until wait(). \param work  null if the result is there.
  PendingExchange(at::Tensor result, at::Tensor sent, c10::intrusive_ptr<c10d::Work> work);

  /// Waits as a blocking collective does: the host, or on a device the current stream.
  at::Tensor wait();

 private:
  at::Tensor result_, sent_;
  c10::intrusive_ptr<c10d::Work> work_;
};

/// One exchange between the ranks of a group.
struct Exchange : torch::CustomClassHolder {
  enum class Kind { kCopy, kSum, kTakePart, kJoin, kJoinToBeSummed, kReduceScatter, kAllToAll };

  Exchange(
      Kind kind, ProcessGroup group, int64_t dim = 0, std::vector<int64_t> input_splits = {},
      std::vector<int64_t> output_splits = {});

  /// The exchange of the gradient of the result.
  c10::intrusive_ptr<Exchange> backward() const;
  bool communicates() const { return kind != Kind::kCopy && kind != Kind::kTakePart; }
  /// The result for `t`, without autograd.
  at::Tensor run(const at::Tensor& t) const;
  /// run() that returns at once: of kCopy, kSum, and along dimension 0 of kJoinToBeSummed and
  /// kReduceScatter. kSum overwrites `t`.
  PendingExchange start(const at::Tensor& t) const;

  Kind kind;
  ProcessGroup group;
  int64_t dim;  // at least 0
  std::vector<int64_t> input_splits, output_splits;
};

/// Runs an exchange as a node of autograd.
at::Tensor apply_exchange(const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange);

/// Exchange::start() within a backward pass. With create_graph the result is complete, and autograd
/// reaches `t`.
PendingExchange start_in_backward(
    const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange);

}  // namespace ddp::functional
