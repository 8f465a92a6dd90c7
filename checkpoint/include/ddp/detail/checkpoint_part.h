#pragma once

#include <ddp/export.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/serialize/archive.h>

namespace ddp::detail {

class CheckpointPart;
using CheckpointPartPtr = std::shared_ptr<CheckpointPart>;

DDP_API CheckpointPartPtr part_of_module(std::shared_ptr<torch::nn::Module> module);
DDP_API CheckpointPartPtr part_of_module(torch::nn::Module& module);
DDP_API CheckpointPartPtr part_of_optimizer(torch::optim::Optimizer& optimizer);
DDP_API CheckpointPartPtr part_of_scheduler(torch::optim::LRScheduler& scheduler);
DDP_API CheckpointPartPtr part_of_scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler);
DDP_API CheckpointPartPtr part_of_generator(at::Generator& generator);
DDP_API CheckpointPartPtr part_of_tensor(at::Tensor& tensor);
DDP_API CheckpointPartPtr part_of_archive(
    std::function<void(torch::serialize::OutputArchive&)> save,
    std::function<void(torch::serialize::InputArchive&)> load);
DDP_API CheckpointPartPtr
part_of_int(std::function<int64_t()> get, std::function<void(int64_t)> set);
DDP_API CheckpointPartPtr
part_of_double(std::function<double()> get, std::function<void(double)> set);
DDP_API CheckpointPartPtr part_of_string(std::string& text);

template <typename T, typename = void>
struct HasSaveAndLoad : std::false_type {};
template <typename T>
struct HasSaveAndLoad<
    T, std::void_t<
           decltype(std::declval<T&>().save(std::declval<torch::serialize::OutputArchive&>())),
           decltype(std::declval<T&>().load(std::declval<torch::serialize::InputArchive&>()))>>
    : std::true_type {};

template <typename T>
struct IsSharedModule : std::false_type {};
template <typename M>
struct IsSharedModule<std::shared_ptr<M>> : std::is_base_of<torch::nn::Module, M> {};

template <typename T>
inline constexpr bool kIsModuleHolder = std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>;

/// Makes the part for `Checkpointer::add`, from the first kind that fits.
template <typename T>
CheckpointPartPtr part_of(T& part) {
  if constexpr (kIsModuleHolder<T>) {
    return part_of_module(
        part.is_empty() ? nullptr : std::static_pointer_cast<torch::nn::Module>(part.ptr()));
  } else if constexpr (IsSharedModule<T>::value) {
    return part_of_module(std::static_pointer_cast<torch::nn::Module>(part));
  } else if constexpr (std::is_base_of_v<torch::nn::Module, T>) {
    return part_of_module(static_cast<torch::nn::Module&>(part));
  } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, T>) {
    return part_of_optimizer(part);
  } else if constexpr (HasSaveAndLoad<T>::value) {
    return part_of_archive(
        [&part](torch::serialize::OutputArchive& archive) { part.save(archive); },
        [&part](torch::serialize::InputArchive& archive) { part.load(archive); });
  } else if constexpr (std::is_base_of_v<torch::optim::LRScheduler, T>) {
    return part_of_scheduler(static_cast<torch::optim::LRScheduler&>(part));
  } else if constexpr (std::is_base_of_v<torch::optim::ReduceLROnPlateauScheduler, T>) {
    return part_of_scheduler(static_cast<torch::optim::ReduceLROnPlateauScheduler&>(part));
  } else if constexpr (std::is_same_v<T, at::Generator>) {
    return part_of_generator(part);
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return part_of_tensor(part);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return part_of_string(part);
  } else if constexpr (std::is_integral_v<T>) {
    return part_of_int(
        [&part] { return static_cast<int64_t>(part); },
        [&part](int64_t value) { part = static_cast<T>(value); });
  } else if constexpr (std::is_floating_point_v<T>) {
    return part_of_double(
        [&part] { return static_cast<double>(part); },
        [&part](double value) { part = static_cast<T>(value); });
  } else {
    static_assert(
        HasSaveAndLoad<T>::value,
        "Checkpointer::add: expected a module, an optimizer, a scheduler, a generator, a tensor, a "
        "number, a string, or a type with save(torch::serialize::OutputArchive&) and "
        "load(torch::serialize::InputArchive&)");
  }
}

}  // namespace ddp::detail
