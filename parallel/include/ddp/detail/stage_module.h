#pragma once

// Not a public header: a module of a pipeline, without its type.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <ddp/detail/wrappable.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <ddp/fully_sharded.h>
#include <ddp/output_tensors.h>
#include <torch/nn/module.h>

namespace ddp::detail {

using StageTensors = std::vector<at::Tensor>;

/// The module whose forward says which arguments a wrapper's takes.
template <typename Module>
struct InnerModule {
  using type = Module;
};
template <typename M>
struct InnerModule<DistributedDataParallelImpl<M>> : InnerModule<PointeeOf<M>> {};
template <typename M>
struct InnerModule<FullyShardedDataParallelImpl<M>> : InnerModule<PointeeOf<M>> {};

template <size_t>
using StageTensor = at::Tensor&;
template <typename Module, typename Arguments, typename = void>
constexpr bool takes = false;
template <typename Module, size_t... i>
constexpr bool takes<
    Module, std::index_sequence<i...>,
    std::void_t<decltype(std::declval<Module&>().forward(std::declval<StageTensor<i>>()...))>> =
    true;
template <typename Module>
constexpr bool takes<
    Module, StageTensors,
    std::void_t<decltype(std::declval<Module&>().forward(std::declval<StageTensors&>()))>> = true;

/// The most tensors that a forward may take one by one; with more it takes a vector.
constexpr size_t kMostStageTensors = 8;

/// One step's use of a module. If that is a wrapper, forward passes are followed by reductions only
/// through sync_in_backward(); and units of a sharded model whose reshard_after_forward is unset
/// stay whole, from their first use to the end.
class DDP_API StageUse {
 public:
  explicit StageUse(torch::nn::Module& module);
  ~StageUse();
  C10_DISABLE_COPY_AND_ASSIGN(StageUse);

 private:
  std::unique_ptr<NoSyncGuard> no_sync_;
  FullyShardedBase* sharded_ = nullptr;
};

/// A module of a pipeline: its forward with tensors, and what it reduces.
struct DDP_API StageModule {
  std::shared_ptr<torch::nn::Module> module;
  /// Unset where forward does not take that many tensors.
  std::function<std::optional<StageTensors>(StageTensors&)> forward;

  /// Of a wrapper: reduces in the coming backward through `outputs`.
  void sync_in_backward(const StageTensors& outputs) const;
  /// Whether it is a wrapper that reduces gradients. A sharded one of frozen parameters has none to
  /// reduce, on any rank. A pass without a graph says nothing of other ranks, which may have one.
  bool reduces() const;
  /// Whether it may do so in each backward pass of a step, over gradients that it reduced in those
  /// before: a mean of what is equal on all ranks changes nothing, and a sum does.
  bool may_reduce_each() const;
};

/// \throws c10::Error  unless all tensors of a result were found.
DDP_API void check_stage_result(bool is_understood, const std::string& type);

template <typename Result>
StageTensors tensors_of_result(const Result& result) {
  StageTensors tensors;
  const bool is_understood =
      for_each_tensor(result, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  check_stage_result(is_understood, c10::demangle_type<Result>());
  return tensors;
}

template <typename Module, size_t... i>
bool forward_if_count(
    Module& module, StageTensors& inputs, std::optional<StageTensors>& outputs,
    std::index_sequence<i...>) {
  using Inner = typename InnerModule<Module>::type;
  if constexpr (takes<Inner, std::index_sequence<i...>>) {
    if (inputs.size() != sizeof...(i)) return false;
    outputs = tensors_of_result(module.forward(inputs[i]...));
    return true;
  } else {
    return false;
  }
}

template <typename Module, size_t... count>
std::optional<StageTensors> forward_with_tensors(
    Module& module, StageTensors& inputs, std::index_sequence<count...>) {
  using Inner = typename InnerModule<Module>::type;
  std::optional<StageTensors> outputs;
  const bool has_run =
      (forward_if_count(module, inputs, outputs, std::make_index_sequence<count + 1>()) || ...);
  if constexpr (takes<Inner, StageTensors>) {
    if (!has_run) outputs = tensors_of_result(module.forward(inputs));
  }
  return outputs;
}

/// \param holder  a module holder or a std::shared_ptr to a module.
template <typename M>
StageModule make_stage_module(const M& holder) {
  static_assert(
      is_wrappable<M>,
      "PipelineStage: pass a std::shared_ptr to the module, as std::make_shared<Net>() makes it, "
      "or a holder from TORCH_MODULE(Net)");
  static_assert(has_forward<M>(), "PipelineStage: the module has no forward");
  std::shared_ptr<PointeeOf<M>> module;
  if constexpr (is_shared_module<M>) {
    module = holder;
  } else if (!holder.is_empty()) {
    module = holder.ptr();
  }
  return {module, [module](StageTensors& inputs) {
            return forward_with_tensors(
                *module, inputs, std::make_index_sequence<kMostStageTensors>());
          }};
}

}  // namespace ddp::detail
