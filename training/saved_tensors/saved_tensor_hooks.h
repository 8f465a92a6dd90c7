// How autograd keeps the tensors that operations save for backward.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

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

/// Copies dense tensors to the host, and back to their devices when they are unpacked.
///
/// From an accelerator: to pinned memory, on a stream of its own beside the current one, which goes
/// on. Whatever stream unpacks waits for that copy. Where the copies are slower than what saves,
/// the current stream waits for the copy before the last few, so that the device's memory has no
/// more than these.
///
/// Threads: one.
class CopiesToHost {
 public:
  CopiesToHost() = default;
  /// Blocks: no. The tensors' memory stays until they are copied.
  ~CopiesToHost();
  C10_DISABLE_COPY_AND_ASSIGN(CopiesToHost);

  UnpackFunction add(const at::Tensor& tensor);

 private:
  struct HostCopy;
  struct Copying {
    at::Tensor tensor;
    std::shared_ptr<const HostCopy> copy;
    c10::Stream from, by;  // the stream that saved it, and the one that copies
  };

  void begin_copy(const at::Tensor& tensor, const std::shared_ptr<HostCopy>& copy);

  std::deque<Copying> copying_;  // the oldest first
};

}  // namespace ddp
