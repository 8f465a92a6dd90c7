#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <ddp/detail/recompute.h>
#include <ddp/detail/wrappable.h>
#include <ddp/export.h>
#include <ddp/move_tensors.h>
#include <ddp/output_tensors.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// \file
/// Activation checkpointing: forward keeps the arguments of a part of the model and drops the
/// activations between them and the result; backward computes that part once more. Less memory for
/// more time. As Python's torch.utils.checkpoint, without its use_reentrant: gradients, random
/// numbers (dropout), autocast and buffers are those of a run without it, to the bit.
///
/// - Under the wrapper nothing changes: a hook fires once a parameter, and all-reduces of buckets
///   start while earlier parts are computed again.
/// - Arguments may hold tensors as DistributedDataParallel's may: in optionals, vectors, pairs,
///   tuples, maps, or a type with a move_tensors() of its own.
/// - A parameter that the function did not use has no gradient, as without checkpointing. But
///   find_unused_parameters counts it as used, and waits for its gradient: decide outside whether
///   to use it.
/// - backward with create_graph is an error.
///
/// Memory: the arguments, the result, and what was in the buffers that forward writes; during the
/// call also its activations. Time: one more forward of the part, in backward.
/// Threads: as for any forward and backward.
/// Source: torch.utils.checkpoint, torch 2.11.0.

/// Options for `checkpoint`.
struct CheckpointOptions {
  /// Whether the recomputation draws the same random numbers: of the CPU, and of the devices of
  /// arguments and parameters. False, where nothing is drawn, saves a copy of 5 KB a call.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// Whether backward compares shape, dtype and device of the two results.
  TORCH_ARG(bool, determinism_check) = true;
  /// For a function that is not a module: the parameters that it uses. A missing one is an error in
  /// backward.
  TORCH_ARG(std::vector<at::Tensor>, parameters) = {};
  /// For a function that is not a module: the modules that it uses, whose parameters need not be
  /// named then, and whose buffers are as without checkpointing. Buffers of a module that is not
  /// named are written twice; where these are a normalization's, it is an error in forward.
  TORCH_ARG(std::vector<std::shared_ptr<torch::nn::Module>>, modules) = {};
};

namespace detail {

template <typename Result>
std::vector<at::Tensor> tensors_of(const Result& result) {
  std::vector<at::Tensor> tensors;
  const bool understood =
      for_each_tensor(result, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  check_result_understood(understood, c10::demangle_type<Result>());
  return tensors;
}

/// \param call  everything but run and inputs.
template <typename Function, typename... Args>
auto checkpoint_call(RepeatableCall call, Function function, Args&&... args) {
  using Arguments = std::tuple<std::decay_t<Args>...>;
  static_assert(
      (std::is_copy_constructible_v<std::decay_t<Args>> && ...),
      "checkpoint: an argument cannot be copied, and is needed a second time in backward");
  Arguments arguments(std::forward<Args>(args)...);
  const auto note = [&](const at::Tensor& tensor) {
    call.inputs.push_back(tensor);
    return tensor;
  };
  (void)moved_by(TensorMove(note), arguments);
  if (!call.needs_gradients()) return std::apply(function, arguments);
  call.run = [function, arguments](const std::vector<at::Tensor>& inputs) mutable {
    auto next = inputs.begin();
    const auto replace = [&](const at::Tensor&) { return *next++; };
    auto replaced = moved_by(TensorMove(replace), arguments);
    return tensors_of(std::apply(function, replaced));
  };
  Recomputation recomputation(std::move(call));
  auto result = std::apply(function, arguments);
  recomputation.connect(tensors_of(result));
  return result;
}

template <typename T>
constexpr bool is_checkpointable_module = is_wrappable<T> || is_module<T>;

/// Returns a pointer that keeps the module alive, where it has an owner.
template <typename M>
auto pointer_to(M& module) {
  if constexpr (is_shared_module<std::decay_t<M>>) {
    return module;
  } else if constexpr (is_module_holder<std::decay_t<M>>) {
    return module.ptr();
  } else {
    return std::shared_ptr<M>(
        const_cast<std::remove_const_t<M>&>(module).torch::nn::Module::weak_from_this().lock(),
        &module);
  }
}

template <typename F, typename... Args>
auto checkpoint_with(const CheckpointOptions& options, F& function, Args&&... args) {
  RepeatableCall call;
  call.preserve_rng_state = options.preserve_rng_state();
  call.determinism_check = options.determinism_check();
  call.take_from(options.parameters());
  for (const auto& module : options.modules()) call.take_from(*module);
  if constexpr (is_checkpointable_module<std::decay_t<F>>) {
    const auto module = pointer_to(function);
    call.take_from(*module);
    return checkpoint_call(
        std::move(call), [module](auto&... arguments) { return module->forward(arguments...); },
        std::forward<Args>(args)...);
  } else {
    return checkpoint_call(std::move(call), function, std::forward<Args>(args)...);
  }
}

}  // namespace detail

/// Calls `module->forward(args...)`, and keeps no activations: backward computes them again.
///
/// ```
/// for (auto& block : blocks) x = ddp::checkpoint(block, x);
/// ```
/// \param module  a holder, a shared_ptr, or a module that lives until backward has passed.
/// \return the result of forward. Changing a view of an argument in it in place is an error.
/// \throws c10::Error  forward changes an argument or a parameter in place. In backward: an
///         argument, a parameter or a buffer was changed in place since, or the second result has
///         another shape or depends on a parameter that is not the module's.
template <
    typename M, typename... Args,
    std::enable_if_t<detail::is_checkpointable_module<std::decay_t<M>>, int> = 0>
auto checkpoint(M& module, Args&&... args) {
  return detail::checkpoint_with(CheckpointOptions(), module, std::forward<Args>(args)...);
}

/// The same with options, and for functions that are not modules.
///
/// ```
/// ddp::checkpoint(ddp::CheckpointOptions().parameters({weight}), [=](const at::Tensor& x) {
///   return torch::relu(torch::mm(x, weight));
/// }, x);
/// ```
/// \param function  is copied and called twice; it may also be a module.
template <typename F, typename... Args>
auto checkpoint(const CheckpointOptions& options, F&& function, Args&&... args) {
  return detail::checkpoint_with(options, function, std::forward<Args>(args)...);
}

/// Runs the modules of `net` one after the other, in `segments` checkpointed parts. The last part
/// is not checkpointed, because backward begins with it. Parts have equally many modules; the last
/// also has the remainder.
///
/// \param input  of the first module; each module takes and returns one tensor.
/// \throws c10::ValueError  `segments` is not between 1 and the number of modules.
DDP_API at::Tensor checkpoint_sequential(
    torch::nn::Sequential& net, int64_t segments, at::Tensor input,
    const CheckpointOptions& options = {});

namespace detail {

/// Gives `forward` the wrapped module's own signature, so that a Sequential accepts it; `forward`
/// is a template where the module's is one, or is overloaded.
template <typename M, typename Forward>
struct CheckpointForward {
  template <typename... Args>
  auto forward(Args&&... args) {
    return checkpoint(static_cast<M*>(this)->module(), std::forward<Args>(args)...);
  }
};
template <typename M, typename Result, typename Class, typename... Args>
struct CheckpointForward<M, Result (Class::*)(Args...)> {
  std::decay_t<Result> forward(Args... args) {
    return checkpoint(static_cast<M*>(this)->module(), std::forward<Args>(args)...);
  }
};
template <typename M, typename Result, typename Class, typename... Args>
struct CheckpointForward<M, Result (Class::*)(Args...) const>
    : CheckpointForward<M, Result (Class::*)(Args...)> {};

}  // namespace detail

/// The implementation of `Checkpoint`.
template <typename M>
class CheckpointImpl
    : public torch::nn::Module,
      public detail::CheckpointForward<
          CheckpointImpl<M>, typename detail::ForwardPointer<detail::PointeeOf<M>>::type> {
 public:
  /// \param module  a holder from TORCH_MODULE, or a std::shared_ptr.
  explicit CheckpointImpl(M module) : module_(register_module("module", std::move(module))) {}

  /// The module whose forward is checkpointed.
  M& module() { return module_; }

 private:
  M module_;
};

/// A module whose forward is checkpointed wherever it is called: it can replace the module, also in
/// a Sequential.
///
/// ```
/// net->push_back(ddp::Checkpoint(Block(512)));
/// ```
/// The wrapped module is its child "module", so names in its state read "module.fc.weight".
template <typename M>
class Checkpoint : public torch::nn::ModuleHolder<CheckpointImpl<M>> {
 public:
  using torch::nn::ModuleHolder<CheckpointImpl<M>>::ModuleHolder;
  /// The implementation that the holder points to.
  using Impl = CheckpointImpl<M>;

  /// Calls `forward`.
  template <typename... Args>
  auto operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};
/// Deduces M.
template <typename M>
Checkpoint(M) -> Checkpoint<M>;

}  // namespace ddp
