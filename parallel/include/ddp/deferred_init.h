#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>

namespace torch::nn {
class Module;
}

namespace ddp {

/// While it exists, modules that this thread builds get no memory for their parameters.
///
///     torch::manual_seed(1);
///     std::shared_ptr<Net> net;
///     {
///       ddp::DeferredInit deferred;
///       net = std::make_shared<Net>();    // sizes, names and dtypes, and no values
///     }
///     ddp::materialize(*net);             // the values that Net() would have drawn
///
/// What makes, changes or reads tensors inside is recorded, and repeated by materialize(). A tensor
/// made inside has its sizes and dtype, and its handles, views and places in optimizers stay valid.
/// Only what the constructor fills through a pointer has memory at once: up to 4 KiB a tensor, as
/// of torch::tensor(std::vector<float>).
///
/// Values equal those of an ordinary construction at the guard's place, bit for bit, in whatever
/// order modules are materialized. The default generator stands afterwards where it would, unless
/// other numbers were drawn from it since the guard.
///
/// \throws c10::Error  inside, from what needs a value (item(), equal(), printing, nonzero()) or
///         cannot be recorded (resize_(), a graph). Before materialize(), from what reads a value:
///         forward, clone(), to(), torch::save().
///
/// Guards nest. Threads: a guard is its thread's; other threads build as ever.
class DDP_API [[nodiscard]] DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  C10_DISABLE_COPY_AND_ASSIGN(DeferredInit);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Gives the module's parameters and buffers, and those of the modules in it, memory and the values
/// that were recorded. Does nothing to tensors that have theirs.
///
/// Memory: the module, and the largest tensor that is recorded before it and not part of it.
/// Collective: no; yes if layers that are cut over a group were built, whose ranks compare what
/// they drew.
/// Threads: other threads must not draw from the default generators meanwhile, but may materialize.
DDP_API void materialize(torch::nn::Module& module);

/// The same for single tensors: of a unit, one after the other, or members that are not registered.
DDP_API void materialize(const std::vector<at::Tensor>& tensors);

/// Whether the tensor was made under a DeferredInit guard, and not materialized since.
DDP_API bool is_deferred(const at::Tensor& tensor);

}  // namespace ddp
