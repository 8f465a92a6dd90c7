#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/detail/forward_argument.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

namespace ddp {

namespace detail {

/// The parameters and buffers of a TorchScript module, and its submodules', as those of a
/// torch::nn::Module, by the same names. Both have the same tensors. A parameter with several names
/// has the first alone, as in Python's parameters(): an optimizer would step it once for each.
class DDP_API ScriptedPart : public torch::nn::Module {
 public:
  using Seen = std::unordered_set<const void*>;  // TensorImpls

  /// \param seen  of the parameters of parts before.
  ScriptedPart(torch::jit::Module script, Seen& seen);

  const torch::jit::Module& script() const { return script_; }

  /// torch::nn::Module. Of the script too.
  void train(bool on = true) override;
  /// torch::nn::Module. A copy of the script, with tensors of its own.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

  /// \throws c10::Error  where the script has assigned another tensor to a buffer: it names it.
  void check_buffers() const;

 private:
  struct Buffer {
    std::string name;
    size_t slot;  // of the script's object
  };

  torch::jit::Module script_;
  std::vector<std::pair<std::string, std::shared_ptr<ScriptedPart>>> parts_;
  std::vector<std::pair<Buffer, at::Tensor>> buffers_of_script_;
};

}  // namespace detail

/// The module in a `DistributedDataParallel<torch::jit::Module>`: a TorchScript module, as
/// torch::jit::load() reads it, trained like any other.
///
/// ```
/// ddp::DistributedDataParallel model(torch::jit::load("net.pt"));
/// torch::optim::SGD optimizer(model->parameters(), 0.1);
/// auto loss = model->forward({input}).toTensor().mean();
/// loss.backward();                                   // gradients averaged here
/// optimizer.step();
/// if (ddp::get_rank() == 0) model->module().save("out.pt");   // Python loads it
/// ```
/// Names in its state are the script's: "fc.weight", or "module.fc.weight" in the wrapper's own.
/// Other methods: `model->run([&] { return model->module().run_method("sample", x); })`. Tensors in
/// tuples, lists, dicts and optionals of arguments and results are found.
///
/// Call the wrapper's `train()` and `eval()`, which reach the script; the script's own do not reach
/// the wrapper. Sparse gradients are not supported. Tensors in lists, dicts and optionals among the
/// script's attributes are neither parameters nor buffers: each rank keeps its own, and a warning
/// at construction names them.
///
/// A script writes its buffers in place (`self.mean.mul_(0.9).add_(new)`), as batch normalization
/// does: where it assigns another tensor to one, `forward` throws. A module without trainable
/// parameters, such as one of torch.jit.freeze, is refused at construction.
template <>
class DDP_API DistributedDataParallelImpl<torch::jit::Module> : public DistributedDataParallelBase {
 public:
  /// See DistributedDataParallel.
  ///
  /// \param module  on the device where it computes. The wrapper keeps the handle: both are the
  ///        same module.
  explicit DistributedDataParallelImpl(
      torch::jit::Module module, const DistributedDataParallelOptions& options = {});

  /// The script's `forward`.
  ///
  /// \throws c10::Error  as the script, and for buffers that it assigned.
  ///
  /// Collective: no, except in a join() with throw_on_early_termination.
  c10::IValue forward(
      std::vector<c10::IValue> inputs, const torch::jit::Kwargs& kwargs = torch::jit::Kwargs());

  /// A copy without the wrapper, with tensors of its own, as of any wrapped module.
  torch::jit::Module snapshot(const std::optional<c10::Device>& device = std::nullopt) const;

  /// The module that was wrapped.
  torch::jit::Module& module() { return module_; }
  /// The same.
  const torch::jit::Module& module() const { return module_; }

 private:
  DistributedDataParallelImpl(
      std::shared_ptr<detail::ScriptedPart> part, const DistributedDataParallelOptions& options);
  void check_forward() const override { part_->check_buffers(); }

  const std::shared_ptr<detail::ScriptedPart> part_;
  torch::jit::Module module_;
};

}  // namespace ddp
