#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/equal_batches.h>
#include <ddp/fully_sharded.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <torch/nn/modules/container/any.h>

#include "sharded/sharded_parameters.h"

namespace ddp {
namespace {

/// A part of a Sequential, whose type is not known. Has the names of the part itself.
class SequentialPart : public torch::nn::Module {
 public:
  explicit SequentialPart(torch::nn::AnyModule part) : part_(std::move(part)) {
    register_parts_of(*part_.ptr(), *this);
  }

  at::Tensor forward(at::Tensor x) { return part_.any_forward(std::move(x)).get<at::Tensor>(); }
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    part_.ptr()->train(on);
  }

 private:
  torch::nn::AnyModule part_;
};

using Unit = FullyShardedDataParallelImpl<std::shared_ptr<SequentialPart>>;

/// Makes units from the inside outwards.
class UnitMaker {
 public:
  UnitMaker(int64_t min_num_params, const FullyShardedOptions& options)
      : min_num_params_(min_num_params), options_(options) {}

  /// Makes units of parts of the Sequentials in a module.
  ///
  /// \return how many elements of the module are in no unit.
  int64_t visit(torch::nn::Module& module) {
    if (dynamic_cast<FullyShardedBase*>(&module) != nullptr) return 0;
    auto left = own_elements(module);
    auto* net = module.as<torch::nn::SequentialImpl>();
    std::ptrdiff_t index = 0;
    for (const auto& child : module.named_children()) {
      const auto of_child = visit(*child.value());
      if (net != nullptr && of_child >= min_num_params_ && of_child > 0) {
        wrap(*net, index, child.key());
      } else {
        left += of_child;
      }
      ++index;
    }
    return left;
  }

  /// Makes units of the parts of a Sequential alone, not of parts in them.
  void wrap_children(torch::nn::SequentialImpl& net) {
    std::ptrdiff_t index = 0;
    for (const auto& child : net.named_children()) {
      if (elements_in_no_unit(*child.value()) > 0) wrap(net, index, child.key());
      ++index;
    }
  }

  int64_t made() const { return made_; }

 private:
  static int64_t own_elements(const torch::nn::Module& module) {
    int64_t elements = 0;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (item.value().defined()) elements += item.value().numel();
    }
    return elements;
  }
  static int64_t elements_in_no_unit(const torch::nn::Module& module) {
    if (dynamic_cast<const FullyShardedBase*>(&module) != nullptr) return 0;
    auto elements = own_elements(module);
    for (const auto& child : module.children()) elements += elements_in_no_unit(*child);
    return elements;
  }

  void wrap(torch::nn::SequentialImpl& net, std::ptrdiff_t index, const std::string& name) {
    auto& place = *(net.begin() + index);
    auto unit = std::make_shared<Unit>(std::make_shared<SequentialPart>(place), options_);
    net.replace_module(name, unit);
    place = torch::nn::AnyModule(unit);
    ++made_;
  }

  const int64_t min_num_params_;
  const FullyShardedOptions& options_;
  int64_t made_ = 0;
};

}  // namespace

int64_t fully_shard(
    torch::nn::Sequential& net, int64_t min_num_params, const FullyShardedOptions& options) {
  DDP_CHECK_VALUE(!net.is_empty(), "fully_shard: expected a Sequential, got an empty holder.");
  DDP_CHECK_VALUE(
      min_num_params >= 0, "fully_shard: expected min_num_params of at least 0, got ",
      min_num_params, ".");
  UnitMaker maker(min_num_params, options);
  maker.visit(*net);
  return maker.made();
}

int64_t fully_shard_children(torch::nn::Sequential& net, const FullyShardedOptions& options) {
  DDP_CHECK_VALUE(
      !net.is_empty(), "fully_shard_children: expected a Sequential, got an empty holder.");
  UnitMaker maker(/*min_num_params=*/0, options);
  maker.wrap_children(*net);
  return maker.made();
}

int64_t equal_batches(int64_t batches, EqualBatches which, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  auto count = at::full({1}, batches, at::dtype(at::kLong).device(carrier_device(*group)));
  all_reduce(
      count, which == EqualBatches::Least ? c10d::ReduceOp::MIN : c10d::ReduceOp::MAX, group);
  return count.item<int64_t>();
}

}  // namespace ddp
