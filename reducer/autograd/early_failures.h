#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

struct ExpectedPass;

/// Detects that a backward pass throws before it reaches outputs of a forward pass: in a node of
/// the loss, or in a hook. No hook of the reducer has run by then.
///
/// While a backward pass through outputs is expected, a callback of RecordFunction sees what
/// autograd evaluates. In the first one that goes through the outputs it leaves an object, which
/// autograd destroys when that pass ends.
///
/// Threads: any; on_failure() runs on the thread that calls backward().
class EarlyFailures {
 public:
  /// Whether the backward pass of the calling thread is one of those that are expected.
  using IsExpected = std::function<bool()>;
  /// Called with what a pass threw, wherever it did; null where that is not known.
  using OnFailure = std::function<void(const std::exception_ptr& cause)>;

  EarlyFailures(IsExpected is_expected, OnFailure on_failure);
  ~EarlyFailures();
  C10_DISABLE_COPY_AND_ASSIGN(EarlyFailures);

  /// Expects a backward pass through `outputs`, or through those of earlier calls.
  void expect(const std::vector<at::Tensor>& outputs);
  /// Expects none any more: one has reached the outputs.
  void reached();

 private:
  const std::shared_ptr<ExpectedPass> pass_;  // passes that run may outlive this
};

}  // namespace ddp
