#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ddp/export.h>

namespace ddp {

/// While it exists, what this thread's operations save for backward is kept in host memory.
///
///     at::Tensor loss;
///     {
///       ddp::save_on_host saved;
///       loss = cross_entropy(model->forward(x), y);
///     }
///     loss.backward();  // copies each tensor back when its operation needs it
///
/// Tensors on accelerators are copied to pinned memory beside forward, on a stream of their own,
/// and back in backward, on the stream that needs them. The host waits for neither. Forward's
/// memory on the device is that of what is in use, and of at most the last four tensors saved,
/// which may still be on their way: where copies take longer than forward, its stream waits for
/// them. Gradients are to the bit what they are without. Stay where they are: tensors on the CPU,
/// parameters (and other leaves that require gradients), and what is not dense. As Python's
/// torch.autograd.graph.save_on_cpu with pin_memory, which copies parameters as well.
///
/// A tensor that several operations save is copied for each. A change in place between an operation
/// and backward is an error in backward, as without the guard.
///
/// Guards nest; the innermost counts. Backward may run after the guard, on any thread, and twice
/// with retain_graph. What backward itself saves (create_graph) is kept on the host inside a guard.
///
/// On a GPU it has not been run since a fault was mended that a run there had found, nor with its
/// copies on a stream of their own.
///
/// Threads: a guard is its thread's: destroy it there, in the reverse order. The first one of the
/// process installs an autograd engine of ours, which hands passes to LibTorch's: make it before
/// backward passes run on other threads.
class DDP_API [[nodiscard]] save_on_host {
 public:
  /// \throws c10::Error  where another library's engine is the default one: Python in the process.
  save_on_host();
  ~save_on_host();
  save_on_host(const save_on_host&) = delete;
  save_on_host& operator=(const save_on_host&) = delete;

  /// What was saved since the guard began.
  struct Stats {
    int64_t copied = 0;  ///< tensors that were copied to the host
    int64_t bytes = 0;   ///< of these
    int64_t kept = 0;    ///< tensors that stayed where they were
  };
  /// The counts of now.
  Stats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One line of text: tensors and MiB that were copied, and tensors that stayed.
DDP_API std::string summary(const save_on_host::Stats& stats);

}  // namespace ddp
