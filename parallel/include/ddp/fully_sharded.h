#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <ddp/detail/unit_call.h>
#include <ddp/detail/wrappable.h>
#include <ddp/device_mesh.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <ddp/mixed_precision.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

namespace ddp {

/// \file
/// Fully sharded data parallel: each rank keeps 1/W of a model's parameters, gradients and
/// optimizer state, and gathers the parameters of one unit at a time while it computes.
///
/// Source: torch.distributed.fsdp.fully_shard, torch 2.11.0, which cuts rows where this library
/// cuts elements.

/// The dtypes of a unit's computation and communication. A rank's shards, which the optimizer
/// steps, keep the module's own.
struct MixedPrecisionPolicy {
  MixedPrecisionPolicy() = default;
  /// The dtypes of a DistributedDataParallel, whose reduce_dtype is param_dtype where it is unset.
  MixedPrecisionPolicy(const MixedPrecision& dtypes)  // NOLINT: implicit
      : param_dtype_(dtypes.param_dtype()),
        reduce_dtype_(dtypes.reduce_dtype() ? dtypes.reduce_dtype() : dtypes.param_dtype()),
        buffer_dtype_(dtypes.buffer_dtype()) {}

  /// Of parameters in forward and backward, and in their gathers. Default: their own
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = {};
  /// In which gradients are summed over the ranks. Default: the module's own dtype
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = {};
  /// Dtype to which floating outputs of forward are cast. Default: no cast
  TORCH_ARG(std::optional<at::ScalarType>, output_dtype) = {};
  /// Of floating buffers, once, at construction. Default: their own
  TORCH_ARG(std::optional<at::ScalarType>, buffer_dtype) = {};
  /// Cast floating tensors among forward's arguments to param_dtype. Default: true
  TORCH_ARG(bool, cast_forward_inputs) = true;
  /// Parts of dotted names: parameters with one of them keep their own dtype ("norm" matches
  /// "norm.weight" and "blocks.0.norm.bias"), in gathers as well. Default: none
  TORCH_ARG(std::vector<std::string>, keep_float) = {};
  /// Gather parameters of two dimensions or more in one byte a value, with a scale for each block
  /// of 256: forward and backward compute with the rounded values, at any number of ranks. Shards,
  /// reductions, saves and SummonFullParams keep theirs. As ZeRO++'s quantized weights.
  /// Default: false
  TORCH_ARG(bool, gather_int8) = false;
};

/// Options for `FullyShardedDataParallel`.
struct FullyShardedOptions {
  /// The ranks that share the parameters. Default: the default group
  TORCH_ARG(GroupArg, process_group) = {};
  /// Instead of process_group: a mesh of one axis, or of two: parameters are cut over the last one
  /// and replicated over the first (hybrid sharding). Default: none
  TORCH_ARG(std::optional<DeviceMesh>, mesh) = {};
  /// Free a unit's parameters after its forward, and gather them again in backward. Default: true;
  /// for the unit whose forward the program calls (the root) false
  TORCH_ARG(std::optional<bool>, reshard_after_forward) = {};
  /// Dtypes. Default: the module's own everywhere
  TORCH_ARG(MixedPrecisionPolicy, mp_policy) = {};
  /// Units gathered ahead of the one that computes: 0 or 1. Of the root. Default: 1
  TORCH_ARG(int64_t, prefetch) = 1;
  /// Give all ranks rank 0's parameters and buffers at construction. Default: true
  TORCH_ARG(bool, init_sync) = true;
  /// Keep the unit's shards, and so their gradients and the optimizer's state, in pinned host
  /// memory between their uses, where the module is on a device. Nothing, with a warning, for
  /// modules on the CPU. Default: false
  TORCH_ARG(bool, cpu_offload) = false;
  /// Names in the module ("head.bias") of parameters that stay whole on every rank, and whose
  /// gradients are not averaged. Default: none
  TORCH_ARG(std::vector<std::string>, ignored_parameters) = {};

 public:
  /// DistributedDataParallelOptions' name of ignored_parameters.
  FullyShardedOptions& parameters_to_ignore(std::vector<std::string> names) {
    return ignored_parameters(std::move(names));
  }
  /// DistributedDataParallelOptions' name of mp_policy.
  FullyShardedOptions& mixed_precision(MixedPrecisionPolicy policy) {
    return mp_policy(std::move(policy));
  }
};

/// What one unit did since it was made.
struct UnitStats {
  std::string name;        ///< its path in the root ("layer1"); "" for the root
  int64_t gathers = 0;     ///< of parameters
  int64_t reductions = 0;  ///< of gradients
  int64_t bytes = 0;       ///< gathered, and given to reductions
};

/// See FullyShardedBase::stats().
struct FullyShardedStats {
  std::vector<UnitStats> units;  ///< the root first
};

/// One line of text: units, gathers, reductions and MiB; "" when there are no units.
DDP_API std::string summary(const FullyShardedStats& stats);

class ShardedModel;
class ShardedUnit;
namespace detail {
class StageUse;
}

/// The part of a FullyShardedDataParallel that does not depend on the wrapped type.
class DDP_API FullyShardedBase : public torch::nn::Module, public ShardedModule {
 public:
  ~FullyShardedBase() override;

  /// While the guard exists, forward passes of this root are followed by backward passes that
  /// accumulate whole gradients on this rank, without a reduction; the next reduced one adds them.
  /// Memory: the whole gradients. Without it each backward pass reduces into the shards, in no
  /// memory of its own.
  NoSyncGuard no_sync();

  /// Runs `function` as this unit's forward pass, and returns what it returns, a value: for other
  /// methods than `forward`, and for helper functions that take the module itself. As
  /// DistributedDataParallelBase::run().
  /// ```
  /// auto loss = model->run([&] { return net->loss_of(batch); });
  /// ```
  ///
  /// Collective: yes, as forward. Blocks: host.
  template <typename Function>
  auto run(const Function& function) {
    static_assert(
        !std::is_void_v<decltype(function())>,
        "FullyShardedDataParallel: run() needs the tensors from which backward begins; return "
        "them");
    detail::UnitCall unit(*this);
    return unit.run([&] {
      unit.enter([](const TensorMove&) {});
      return unit.leave(function);
    });
  }

  /// Reduces in the next backward pass through `outputs`, which forward passes inside no_sync()
  /// returned; as DistributedDataParallelBase::sync_in_backward().
  template <typename... Outputs>
  void sync_in_backward(const Outputs&... outputs) {
    std::vector<at::Tensor> tensors;
    const TensorSink sink = [&](const at::Tensor& t) { tensors.push_back(t); };
    (for_each_tensor(outputs, sink), ...);
    sync_outputs(tensors);
  }

  /// Gathers this unit's parameters (not those of units in it) until reshard().
  ///
  /// Collective: yes. Blocks: host.
  void unshard();
  /// Frees them. What was written to whole parameters is lost; values that were computed from them
  /// outside of forward are as after SummonFullParams.
  void reshard();
  /// Sets the option of that name of this unit.
  void set_reshard_after_forward(bool reshard_after_forward);

  /// Counts of this unit and the units in it.
  FullyShardedStats stats() const;

  /// ShardedModule. This unit's parameters, by their names in the wrapped module.
  std::vector<ParameterLayout> layouts() override;
  /// ShardedModule. True.
  bool reduces_gradients() const override { return true; }
  /// ShardedModule. Names this unit where passes of no_sync() left gradients.
  std::string clipping_error() const override;

  /// torch::nn::Module. Throws outside of SummonFullParams, because this rank has its shards alone.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// torch::nn::Module. Reads a whole state, which every rank has, as save() of the module wrote
  /// it. Dtypes are converted.
  ///
  /// Collective: yes. Blocks: host. Memory: the whole model; load_full_state_dict() needs less.
  void load(torch::serialize::InputArchive& archive) override;
  /// torch::nn::Module. Throws.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;
  /// torch::nn::Module. Throws: move the module before it is wrapped.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;  ///< the same
  void to(at::Device device, bool non_blocking = false) override;   ///< the same
  /// torch::nn::Module.
  void train(bool on = true) override;

 protected:
  /// See FullyShardedDataParallel.
  FullyShardedBase(std::shared_ptr<torch::nn::Module> module, const FullyShardedOptions& options);

 private:
  friend class detail::UnitCall;
  friend class detail::StageUse;
  friend class SummonFullParams;

  void hold_units();
  void drop_units() noexcept;
  void sync_outputs(const std::vector<at::Tensor>& outputs);
  void check_whole(const char* call) const;

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<ShardedUnit> unit_;
  std::shared_ptr<ShardedModel> model_;  // of a root; of a unit inside it has no units
  MixedPrecisionPolicy policy_;
  bool gradient_sync_ = true;
};

namespace detail {

/// Gives `forward` the wrapped module's own signature, so that a Sequential accepts it; `forward`
/// is a template where the module's is one, or is overloaded.
template <typename Impl, typename Forward>
struct FullyShardedForward {
  template <typename... Args>
  auto forward(Args&&... args) {
    return static_cast<Impl*>(this)->call(std::forward<Args>(args)...);
  }
};
template <typename Impl, typename Result, typename Class, typename... Args>
struct FullyShardedForward<Impl, Result (Class::*)(Args...)> {
  std::decay_t<Result> forward(Args... args) {
    return static_cast<Impl*>(this)->call(std::forward<Args>(args)...);
  }
};
template <typename Impl, typename Result, typename Class, typename... Args>
struct FullyShardedForward<Impl, Result (Class::*)(Args...) const>
    : FullyShardedForward<Impl, Result (Class::*)(Args...)> {};

}  // namespace detail

/// The implementation of `FullyShardedDataParallel`.
template <typename M>
class FullyShardedDataParallelImpl
    : public FullyShardedBase,
      public detail::FullyShardedForward<
          FullyShardedDataParallelImpl<M>,
          typename detail::ForwardPointer<detail::PointeeOf<M>>::type> {
  static_assert(
      detail::is_wrappable<M>,
      "FullyShardedDataParallel: wrap a std::shared_ptr to the module, as std::make_shared<Net>() "
      "makes it, or a holder from TORCH_MODULE(Net)");

 public:
  /// See FullyShardedDataParallel.
  explicit FullyShardedDataParallelImpl(M module, const FullyShardedOptions& options = {})
      : FullyShardedBase(as_module(module), options), inner_(std::move(module)) {}

  /// The module that was wrapped. Its own `forward` finds the shards.
  M& module() { return inner_; }
  /// The same.
  const M& module() const { return inner_; }

 private:
  template <typename Impl, typename Forward>
  friend struct detail::FullyShardedForward;

  static std::shared_ptr<torch::nn::Module> as_module(const M& module) {
    if constexpr (detail::is_shared_module<M>) {
      return module;
    } else {
      return module.is_empty() ? nullptr : module.ptr();
    }
  }

  template <typename... Args>
  auto call(Args&&... args) {
    detail::UnitCall unit(*this);
    std::tuple<detail::ReplacedArgument<Args&&>...> arguments{
        detail::ReplacedArgument<Args&&>(std::forward<Args>(args))...};
    return unit.run([&] {
      unit.enter([&](const TensorMove& move) {
        std::apply([&](auto&... argument) { (argument.replace(move), ...); }, arguments);
      });
      return unit.leave([&] {
        return std::apply(
            [&](auto&... argument) { return inner_->forward(argument.get()...); }, arguments);
      });
    });
  }

  M inner_;
};

/// A unit of a fully sharded model: holds a module, keeps this rank's shard of its parameters, and
/// gathers them for its forward and its backward.
///
/// ```
/// struct NetImpl : torch::nn::Module {
///   ddp::FullyShardedDataParallel<Block> block1, block2;  // units
///   ...
/// };
/// ddp::FullyShardedDataParallel model(Net{});             // the root: what is in no unit
/// torch::optim::AdamW optimizer(model->parameters(), 1e-3);
/// model->forward(input).sum().backward();                 // .grad: this rank's shards
/// ```
/// A unit has all parameters of its module that no unit in it has. They keep their names, and their
/// tensors: `parameters()` and an optimizer made before find this rank's elements in them, {1, ...,
/// 1, k}. Gradients are averaged over the ranks. Parameters of frozen layers are cut, too.
///
/// Buffers: all ranks get rank 0's with each reduced backward pass in training mode.
///
/// An optimizer steps shards as whole parameters if it updates each element on its own: not LBFGS,
/// and a state that it made while they were whole does not fit. Clip with
/// `clip_grad_norm_(*model, max_norm)`. A GradScaler needs the group in found_inf_groups. A
/// Checkpointer saves the whole, and loads it on any number of ranks.
///
/// Every rank has to call the same units in the same order, in evaluation as well. A rank may leave
/// a unit out of its loss. Parameters may be used in forward of their unit alone, or inside of
/// SummonFullParams; what forward writes to them is kept.
///
/// Collective: construction, forward and backward. Blocks: host.
/// Memory: 1/W of parameters, gradients and optimizer state; while it computes one unit more, two
///   with prefetch; one unit at construction.
/// Cost: a step gathers each unit twice, and reduces it once: 1.5 times what replicas send.
/// \throws c10::ValueError  at construction for options and modules that cannot be cut.
template <typename M>
class FullyShardedDataParallel : public torch::nn::ModuleHolder<FullyShardedDataParallelImpl<M>> {
 public:
  /// The implementation that the holder points to.
  using Impl = FullyShardedDataParallelImpl<M>;

  /// An empty holder.
  FullyShardedDataParallel(std::nullptr_t) : torch::nn::ModuleHolder<Impl>(nullptr) {}
  /// \param module  with its parameters on the device where it computes.
  explicit FullyShardedDataParallel(M module, const FullyShardedOptions& options = {})
      : torch::nn::ModuleHolder<Impl>(std::make_shared<Impl>(std::move(module), options)) {}
  /// Of a module made elsewhere.
  FullyShardedDataParallel(std::shared_ptr<Impl> impl)
      : torch::nn::ModuleHolder<Impl>(std::move(impl)) {}

  /// Calls `forward`.
  template <typename... Args>
  auto operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};
/// Deduces M.
template <typename M>
FullyShardedDataParallel(M) -> FullyShardedDataParallel<M>;
/// Deduces M.
template <typename M>
FullyShardedDataParallel(M, FullyShardedOptions) -> FullyShardedDataParallel<M>;

/// Makes units of the parts of a Sequential, so that each has at least `min_num_params` elements
/// that no other unit has, from the innermost Sequential outwards.
///
/// \param net  whose parts take one tensor and return one.
/// \return the number of units made.
///
/// Collective: yes. Blocks: host.
DDP_API int64_t fully_shard(
    torch::nn::Sequential& net, int64_t min_num_params = 100'000'000,
    const FullyShardedOptions& options = {});

/// Makes a unit of each part of a Sequential that has elements which no other unit has, whatever is
/// in it: of the blocks of a transformer, and not of the layers in them.
///
/// \param net  whose parts take one tensor and return one.
/// \return the number of units made.
///
/// Collective: yes. Blocks: host.
DDP_API int64_t
fully_shard_children(torch::nn::Sequential& net, const FullyShardedOptions& options = {});

/// While the guard exists, the parameters of a model's units are whole on every rank: for reading
/// them, for forward without gathers, or for writing the same to them on every rank. Gathers are
/// exact, also with gather_int8.
///
/// Run the backward of what is computed from them, outside of a unit's forward, inside as well:
/// after it gradients to parameters are an error, and gradients to inputs may read shards in their
/// place.
///
/// Collective: its construction. Blocks: host. Memory: the whole model on every rank; see
/// full_state_dict() for less.
class DDP_API [[nodiscard]] SummonFullParams {
 public:
  /// \param model  the root, or a unit: it and the units in it.
  /// \param write_back  keep at the end what was written to the parameters.
  /// \throws c10::Error  inside forward or backward.
  explicit SummonFullParams(FullyShardedBase& model, bool write_back = false);
  ~SummonFullParams();
  C10_DISABLE_COPY_AND_ASSIGN(SummonFullParams);

  /// Keeps what was written to the parameters so far.
  ///
  /// \throws c10::Error  for a parameter that got another size.
  void write_back() const;

 private:
  void restore() noexcept;

  std::vector<std::shared_ptr<ShardedUnit>> units_;
  std::vector<bool> stayed_whole_;
  bool write_back_;
};

}  // namespace ddp
