// Layers that see the rows of all ranks; the reference computes them on all rows at once.
#include <ddp/functional.h>
#include <ddp/sync_batch_norm.h>

#include "differential/net.h"

namespace ddp::differential {

DDP_SOURCE(
    SyncedBatchNorm, struct SyncedBatchNorm
    : Layer {
      explicit SyncedBatchNorm(const ProcessGroup& group)
          : norm(register_module(
                "norm", SyncBatchNorm1d(SyncBatchNormOptions(4).process_group(group)))) {}
      at::Tensor forward(at::Tensor x) override { return norm(x); }
      SyncBatchNorm1d norm;
    });

// Each rank adds the sum of all ranks' rows.
DDP_SOURCE(
    Gathered, struct Gathered
    : Layer {
      explicit Gathered(const ProcessGroup& group) : group(group) {}
      at::Tensor forward(at::Tensor x) override {
        const auto sums = functional::all_gather((x * weight).sum(0, true), 0, group);
        return x + torch::tanh(sums.sum(0)) / 4;
      }
      at::Tensor weight = register_parameter("weight", torch::ones({4}));
      ProcessGroup group;
    });

// Each rank gets a row of every other one.
DDP_SOURCE(
    Exchanged, struct Exchanged
    : Layer {
      explicit Exchanged(const ProcessGroup& group) : group(group) {}
      at::Tensor forward(at::Tensor x) override {
        const std::vector<int64_t> ones(static_cast<size_t>(group->getSize()), 1);
        const auto own = (x * weight).sum(0, true).expand({group->getSize(), 4}).contiguous();
        return x + torch::tanh(functional::all_to_all(own, ones, ones, group)).sum(0) / 4;
      }
      at::Tensor weight = register_parameter("weight", torch::ones({4}));
      ProcessGroup group;
    });

namespace {

struct Weighted : Layer {
  at::Tensor forward(at::Tensor) override { TORCH_CHECK(false, "it needs all ranks"); }
  at::Tensor weight = register_parameter("weight", torch::ones({4}));
};

template <typename L>
LayerKind across(
    const std::string& source, decltype(LayerKind::together) together,
    decltype(LayerKind::alone) alone) {
  LayerKind kind;
  kind.make = [](const Rank& self, const auto&) { return std::make_shared<L>(self.group); };
  kind.source = source;
  kind.call = "std::make_shared<" + source + ">(self.group)";
  kind.together = std::move(together);
  kind.alone = std::move(alone);
  return kind;
}

std::vector<int64_t> rows_of(const OfRanks& x) {
  std::vector<int64_t> rows;
  for (const auto& own : x) rows.push_back(own.size(0));
  return rows;
}

// The statistics are of all rows; each rank's copy scales its own.
OfRanks normalize(const std::vector<std::shared_ptr<Layer>>& layers, const OfRanks& x) {
  auto* first = dynamic_cast<torch::nn::BatchNorm1dImpl*>(layers[0]->children()[0].get());
  const auto all = torch::cat(at::TensorList(x));
  auto mean = first->running_mean, variance = first->running_var;
  if (first->is_training()) {
    const torch::NoGradGuard no_grad;
    const auto rows = static_cast<double>(all.size(0));
    for (const auto& layer : layers) {
      auto* norm = dynamic_cast<torch::nn::BatchNorm1dImpl*>(layer->children()[0].get());
      norm->num_batches_tracked += 1;
      norm->running_mean.mul_(0.9).add_(all.mean(0), 0.1);
      norm->running_var.mul_(0.9).add_(all.var(0, false) * (rows / (rows - 1)), 0.1);
    }
  }
  if (first->is_training()) mean = all.mean(0), variance = all.var(0, false);
  auto parts = ((all - mean) / (variance + 1e-5).sqrt()).split_with_sizes(rows_of(x));
  OfRanks result;
  for (size_t rank = 0; rank < x.size(); ++rank) {
    auto* norm = dynamic_cast<torch::nn::BatchNorm1dImpl*>(layers[rank]->children()[0].get());
    result.push_back(parts[rank] * norm->weight + norm->bias);
  }
  return result;
}

OfRanks add_sums(
    const std::vector<std::shared_ptr<Layer>>& layers, const OfRanks& x,
    const std::function<at::Tensor(const at::Tensor&)>& combine) {
  std::vector<at::Tensor> sums;
  for (size_t rank = 0; rank < x.size(); ++rank) {
    sums.push_back((x[rank] * layers[rank]->parameters()[0]).sum(0));
  }
  const auto total = combine(torch::stack(sums)) / 4;
  OfRanks result;
  for (const auto& own : x) result.push_back(own + total);
  return result;
}

const RegisteredLayer synced_layer(
    "sync_batch_norm", across<SyncedBatchNorm>("SyncedBatchNorm", normalize, [] {
      return layer_kinds()["batch_norm"].make({}, {});
    }));
const RegisteredLayer gathered_layer(
    "gathered", across<Gathered>(
                    "Gathered",
                    [](const auto& layers, const OfRanks& x) {
                      return add_sums(
                          layers, x, [](auto sums) { return torch::tanh(sums.sum(0)); });
                    },
                    [] { return std::make_shared<Weighted>(); }));
const RegisteredLayer exchanged_layer(
    "exchanged", across<Exchanged>(
                     "Exchanged",
                     [](const auto& layers, const OfRanks& x) {
                       return add_sums(
                           layers, x, [](auto sums) { return torch::tanh(sums).sum(0); });
                     },
                     [] { return std::make_shared<Weighted>(); }));

}  // namespace
}  // namespace ddp::differential
