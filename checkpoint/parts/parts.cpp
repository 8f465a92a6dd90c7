// The kinds of state that a checkpoint holds, except schedulers and random numbers.
#include <ddp/internal/checkpoint_part.h>

#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/zero.h>
#include <torch/serialize/archive.h>

#include "python/module_dict.h"
#include "python/optimizer_dict.h"
#include "python/torch_file.h"

namespace ddp::detail {
namespace {

class ModulePart : public CheckpointPart {
 public:
  ModulePart(torch::nn::Module& module, std::shared_ptr<torch::nn::Module> owner)
      : module_(module), owner_(std::move(owner)) {}

  torch::nn::Module* module() override { return &module_; }
  c10::IValue state() override { return module_dict(module_); }
  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    return prepare_module(module_, saved, context.strict, context.subject);
  }

 private:
  torch::nn::Module& module_;
  const std::shared_ptr<torch::nn::Module> owner_;
};

class OptimizerPart : public CheckpointPart {
 public:
  explicit OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  torch::optim::Optimizer* optimizer() override { return &optimizer_; }
  bool has_named_state() const override { return true; }
  c10::IValue state() override { return optimizer_dict(optimizer_); }
  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    return prepare_optimizer(optimizer_, saved, context.subject);
  }

 private:
  torch::optim::Optimizer& optimizer_;
};

/// An optimizer of which each rank holds a part. Its state is that of the optimizer without
/// sharding, so that it loads on any number of ranks, and in Python.
class ShardedOptimizerPart : public CheckpointPart {
 public:
  explicit ShardedOptimizerPart(ZeroRedundancyOptimizerBase& optimizer) : optimizer_(optimizer) {}

  torch::optim::Optimizer* optimizer() override { return &optimizer_; }
  bool has_named_state() const override { return true; }
  void gather(const ProcessGroup& group, States states) override {
    // Rank 0 of another group need not be rank 0 of this one.
    const bool is_enough = states == States::OfFirst && group == optimizer_.process_group();
    consolidated_ = optimizer_.consolidated(is_enough ? 0 : -1);
  }

  c10::IValue state() override {
    const auto whole = std::move(consolidated_);
    DDP_CHECK(
        whole,
        "Checkpointer: expected a ZeroRedundancyOptimizer in add(), of which every rank loads its "
        "share, got it in add_per_rank(). Call add().");
    return optimizer_dict(*whole);
  }

  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    std::shared_ptr<torch::optim::Optimizer> whole = optimizer_.unsharded();
    auto load = prepare_optimizer(*whole, saved, context.subject);
    load.apply = [this, whole, take = std::move(load.apply)] {
      take();
      optimizer_.load_whole(*whole);
    };
    return load;
  }

 private:
  ZeroRedundancyOptimizerBase& optimizer_;
  std::unique_ptr<torch::optim::Optimizer> consolidated_;  // between gather() and state()
};

/// A state that only the part itself can read: an archive of LibTorch, as a dictionary with one
/// tensor of bytes.
class ArchivePart : public CheckpointPart {
 public:
  ArchivePart(
      std::function<void(torch::serialize::OutputArchive&)> save,
      std::function<void(torch::serialize::InputArchive&)> load)
      : save_(std::move(save)), load_(std::move(load)) {}

  c10::IValue state() override {
    torch::serialize::OutputArchive archive;
    save_(archive);
    std::string bytes;
    archive.save_to([&](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    return make_dict({{kArchive, tensor}});
  }

  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    const auto* bytes = find_in(saved, kArchive);
    DDP_CHECK_VALUE(
        bytes != nullptr && bytes->isTensor() && bytes->toTensor().scalar_type() == at::kByte,
        context.subject, ": expected what save(archive) wrote, got ", saved.tagKind(),
        ". Add the part that was saved under this name.");
    // Only the part's own load() can judge an archive, so loading is tried.
    return {
        [this, bytes = saved, subject = context.subject] { read(bytes, subject); },
        [this, bytes = state(), subject = context.subject] { read(bytes, subject); }};
  }

 private:
  static constexpr const char* kArchive = "archive";

  /// Its tensors come to the devices that they were saved from.
  void read(const c10::IValue& saved, const std::string& subject) {
    const auto bytes = find_in(saved, kArchive)->toTensor().contiguous();
    try {
      torch::serialize::InputArchive archive;
      archive.load_from(
          static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
      load_(archive);
    } catch (const std::exception& error) {
      DDP_CHECK(false, subject, ": ", text_of(error));
    }
  }

  const std::function<void(torch::serialize::OutputArchive&)> save_;
  const std::function<void(torch::serialize::InputArchive&)> load_;
};

/// An optimizer whose state only its own save() and load() can write and read.
class OtherOptimizerPart : public ArchivePart {
 public:
  explicit OtherOptimizerPart(torch::optim::Optimizer& optimizer)
      : ArchivePart(
            [&](torch::serialize::OutputArchive& archive) { optimizer.save(archive); },
            [&](torch::serialize::InputArchive& archive) { optimizer.load(archive); }),
        optimizer_(optimizer) {}

  torch::optim::Optimizer* optimizer() override { return &optimizer_; }

 private:
  torch::optim::Optimizer& optimizer_;
};

/// A plain value: how to get it, how to check a new one, and how to set it.
class ValuePart : public CheckpointPart {
 public:
  using Get = std::function<c10::IValue()>;
  using Check = std::function<bool(const c10::IValue&)>;
  using Set = std::function<void(const c10::IValue&)>;

  ValuePart(std::string kind, Get get, Check check, Set set)
      : kind_(std::move(kind)),
        get_(std::move(get)),
        check_(std::move(check)),
        set_(std::move(set)) {}

  c10::IValue state() override { return get_(); }

  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    DDP_CHECK_VALUE(
        check_(saved), context.subject, ": expected ", kind_, ", got ", saved.tagKind(),
        ". Add the part that was saved under this name.");
    return {[this, saved] { set_(saved); }};
  }

 private:
  const std::string kind_;
  const Get get_;
  const Check check_;
  const Set set_;
};

}  // namespace

CheckpointPartPtr part_of_module(std::shared_ptr<torch::nn::Module> module) {
  DDP_CHECK_VALUE(
      module != nullptr,
      "Checkpointer::add: expected a module, got an empty holder. Construct the module first.");
  auto& reference = *module;
  return std::make_shared<ModulePart>(reference, std::move(module));
}

CheckpointPartPtr part_of_module(torch::nn::Module& module) {
  return std::make_shared<ModulePart>(module, nullptr);
}

CheckpointPartPtr part_of_optimizer(torch::optim::Optimizer& optimizer) {
  if (auto* sharded = dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer)) {
    return std::make_shared<ShardedOptimizerPart>(*sharded);
  }
  if (is_known_optimizer(optimizer)) return std::make_shared<OptimizerPart>(optimizer);
  return std::make_shared<OtherOptimizerPart>(optimizer);
}

CheckpointPartPtr part_of_archive(
    std::function<void(torch::serialize::OutputArchive&)> save,
    std::function<void(torch::serialize::InputArchive&)> load) {
  return std::make_shared<ArchivePart>(std::move(save), std::move(load));
}

CheckpointPartPtr part_of_tensor(at::Tensor& tensor) {
  DDP_CHECK_VALUE(
      tensor.defined(),
      "Checkpointer::add: expected a tensor, got an undefined one. Give it a value first.");
  return std::make_shared<ValuePart>(
      ddp::str("a tensor ", tensor.sizes(), " ", tensor.scalar_type()),
      [&tensor] { return tensor.detach(); },
      [&tensor](const c10::IValue& saved) {
        return saved.isTensor() && saved.toTensor().sizes() == tensor.sizes() &&
               saved.toTensor().scalar_type() == tensor.scalar_type();
      },
      [&tensor](const c10::IValue& saved) {
        const c10::NoGradGuard no_grad;
        tensor.copy_(saved.toTensor());
      });
}

CheckpointPartPtr part_of_int(std::function<int64_t()> get, std::function<void(int64_t)> set) {
  return std::make_shared<ValuePart>(
      "an integer", std::move(get), [](const c10::IValue& saved) { return saved.isInt(); },
      [set = std::move(set)](const c10::IValue& saved) { set(saved.toInt()); });
}

CheckpointPartPtr part_of_double(std::function<double()> get, std::function<void(double)> set) {
  return std::make_shared<ValuePart>(
      "a number", std::move(get), [](const c10::IValue& saved) { return saved.isDouble(); },
      [set = std::move(set)](const c10::IValue& saved) { set(saved.toDouble()); });
}

CheckpointPartPtr part_of_string(std::string& text) {
  return std::make_shared<ValuePart>(
      "a string", [&text] { return text; },
      [](const c10::IValue& saved) { return saved.isString(); },
      [&text](const c10::IValue& saved) { text = saved.toStringRef(); });
}

}  // namespace ddp::detail
