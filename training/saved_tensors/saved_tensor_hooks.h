// How autograd keeps the tensors that operations save for backward.
#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Returns the saved tensor; called once for each time that backward needs it, on any thread.
using UnpackFunction = std::function<at::Tensor()>;
/// Keeps a tensor in some way. What it throws is an error of the operation that saves.
///
/// The tensor is the operation's own, with its graph, which would keep itself alive: keep a copy or
/// a detach().
using PackFunction = std::function<UnpackFunction(const at::Tensor&)>;

/// While it exists, `pack` keeps what operations of this thread save. The innermost one counts.
///
/// Neither function is called with gradients or hooks enabled.
class SavedTensorHooks {
 public:
  /// \throws c10::Error  where the default engine is another library's.
  explicit SavedTensorHooks(PackFunction pack);
  ~SavedTensorHooks();
  C10_DISABLE_COPY_AND_ASSIGN(SavedTensorHooks);
};

/// While it exists, what operations of this thread save is kept as without hooks.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks();
  ~WithoutSavedTensorHooks();
  C10_DISABLE_COPY_AND_ASSIGN(WithoutSavedTensorHooks);
};

/// Keeps the tensor itself, and throws in backward if it was changed in place since: autograd does
/// not look at what hooks return.
UnpackFunction keep_as_it_is(const at::Tensor& tensor);

/// Whether a copy could take the tensor's place: it is dense, and no parameter or other leaf that
/// requires a gradient, whose memory is in use anyway.
bool can_be_replaced(const at::Tensor& tensor);

/// Copies a dense tensor to the host, and back to its device when it is unpacked.
///
/// From an accelerator: to pinned memory, on the current stream, without waiting. Whatever stream
/// unpacks waits for that copy.
UnpackFunction copy_to_host(const at::Tensor& tensor);

}  // namespace ddp
