#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/detail/forward_argument.h>
#include <ddp/detail/wrappable.h>
#include <ddp/distributed_data_parallel_base.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// The module in a `DistributedDataParallel` holder; `->` gives access to it.
template <typename M>
class DistributedDataParallelImpl : public DistributedDataParallelBase {
  static_assert(
      !detail::is_any_module<M>,
      "DistributedDataParallel: an AnyModule hides its forward; wrap the module that it holds");
  static_assert(
      detail::is_wrappable<M> || detail::is_any_module<M>,
      "DistributedDataParallel: wrap a std::shared_ptr to the module, as std::make_shared<Net>() "
      "makes it, or a holder from TORCH_MODULE(Net); the type of the first is "
      "DistributedDataParallel<std::shared_ptr<Net>>");
  // An assertion above is then the only error.
  using Held = std::conditional_t<detail::is_wrappable<M>, M, detail::NotWrappable>;

 public:
  /// See DistributedDataParallel.
  explicit DistributedDataParallelImpl(
      Held module, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(as_module(module), options), module_(std::move(module)) {}

  /// Same arguments and result as the module's own `forward`.
  ///
  /// Collective: no, except in a join() with throw_on_early_termination.
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    static_assert(
        detail::has_forward<M>(),
        "DistributedDataParallel: the wrapped module has no forward; call its functions in run()");
    if constexpr (detail::has_forward<M>()) {  // else the assertion is the only error
      if constexpr ((detail::can_repeat<std::decay_t<Args>> && ...)) {
        if (offer_call()) note_call_of<Args...>(args...);
      }
      return forward_with(
          detail::ForwardArgument<Args&&>(std::forward<Args>(args), input_placement())...);
    }
  }

  /// `clone()` with the wrapped type: for a target network, or for another thread that computes
  /// with the copy or saves it while this one trains. `update_snapshot()` gives it newer values.
  M snapshot(const std::optional<c10::Device>& device = std::nullopt) const {
    using Wrapped = std::decay_t<decltype(*module_)>;
    return M(std::dynamic_pointer_cast<Wrapped>(clone(device)));
  }

  /// The module that was wrapped. Gradients of a backward pass through its own `forward`, without
  /// the wrapper's, are not averaged.
  Held& module() { return module_; }
  /// The same.
  const Held& module() const { return module_; }

 private:
  static std::shared_ptr<torch::nn::Module> as_module(const Held& module) {
    if constexpr (detail::is_shared_module<M>) {
      return module;
    } else if constexpr (detail::is_module_holder<M>) {
      return module.is_empty() ? nullptr : module.ptr();
    } else {
      return nullptr;
    }
  }

  template <typename... Args>
  void note_call_of(const std::remove_reference_t<Args>&... args) {
    detail::CallArguments written;
    (detail::CallPart<std::decay_t<Args>>::write(written, args), ...);
    note_call(std::move(written), [this](detail::CallArguments& given) {
      std::tuple<std::decay_t<Args>...> values{
          detail::CallPart<std::decay_t<Args>>::read(given)...};
      const auto call = [&](auto&... value) -> decltype(auto) {
        return module_->forward(
            detail::ForwardArgument<Args&&>(std::forward<Args>(value), input_placement()).get()...);
      };
      std::vector<at::Tensor> outputs;
      if constexpr (std::is_void_v<decltype(std::apply(call, values))>) {
        std::apply(call, values);
      } else {
        for_each_tensor(
            std::apply(call, values), [&](const at::Tensor& t) { outputs.push_back(t); });
      }
      return outputs;
    });
  }

  template <typename... Arguments>
  decltype(auto) forward_with(Arguments... arguments) {
    note_inputs(arguments.value()...);
    const auto samples =
        counts_samples() ? detail::rows_of_first_tensor(arguments.value()...) : std::nullopt;
    return run_pass(
        samples, [&]() -> decltype(auto) { return module_->forward(arguments.get()...); });
  }

  Held module_;
};

/// Trains replicas of a module on several ranks: every backward pass ends with the same averaged
/// gradients on all ranks, and communicates them while it still runs.
///
/// A module holder over a module, like any other of LibTorch: `model->forward(...)`, `model(x)`,
/// `model->parameters()`, `model->train()`. The wrapped module is its child "module", so names in
/// its state read "module.fc.weight", as in Python; save `model->module()` for plain names.
///
/// \tparam M  a module holder (Net from TORCH_MODULE, torch::nn::Sequential, ...) or a
///         std::shared_ptr to a module; deduced. As a member or a parameter:
///         `DistributedDataParallel<Net>` for a holder Net, else
///         `DistributedDataParallel<std::shared_ptr<Net>>`.
/// \throws c10::ValueError  for an empty module, one without a parameter that requires a gradient,
///         parameters on several device types, unusable device_ids, an unknown name to ignore, or
///         bucket caps that are not positive.
/// \throws c10::Error  with the same text on every rank when the ranks' models or settings differ:
///         it names the first parameter or buffer that differs, with both ranks' shapes.
///
/// What `forward` returns is searched for tensors (`for_each_tensor`); a type of your own needs a
/// `visit_tensors` only for find_unused_parameters and for nested backward passes with
/// static_graph.
///
/// Construction decides which parameters are averaged: freeze parameters before, or call
/// `refresh()` after freezing them. A forward pass while all of them are frozen works and is not
/// averaged (a discriminator in the generator's step). The optimizer may be created before or after
/// wrapping: parameters keep their identity.
///
/// Collective: construction (unless init_sync is false), and the backward pass of each forward
///   outside no_sync(). Every rank has to run as many of both.
/// Threads: use it from one thread.
/// Cost: construction sends each parameter and buffer once; a step, each gradient once.
/// Source: torch.nn.parallel.DistributedDataParallel, torch 2.11.0. Differences: an error of one
///   rank is thrown on all, at the backward that caused it (over NCCL at the next one); the
///   comparison at construction includes names, dtypes and buffers; two forwards before a backward
///   work with BatchNorm.
template <typename M>
class DistributedDataParallel : public torch::nn::ModuleHolder<DistributedDataParallelImpl<M>> {
 public:
  /// The module in this holder.
  using Impl = DistributedDataParallelImpl<M>;
  // TORCH_MODULE cannot name a template, so the holder is written out once.
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// As `forward`. The operator of ModuleHolder does not work with a `forward` that is a template.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

/// Lets the compiler find M.
template <typename M>
DistributedDataParallel(M) -> DistributedDataParallel<M>;
/// Lets the compiler find M.
template <typename M>
DistributedDataParallel(M, DistributedDataParallelOptions) -> DistributedDataParallel<M>;

}  // namespace ddp

// The wrapper of a torch::jit::Module.
#include <ddp/scripted_module.h>  // NOLINT(misc-header-include-cycle)
