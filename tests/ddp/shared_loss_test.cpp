// Several models in one loss, whose ranks use different parts of them: their collectives share one
// group, in which the order counts.
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::shared_loss {
namespace {

using namespace testing;

// Four weights of as many elements, so that buckets in a wrong order would add up without an error.
class BranchesImpl : public torch::nn::Module {
 public:
  explicit BranchesImpl(double value) {
    for (const char* name : {"a", "b", "c", "d"}) {
      register_parameter(name, torch::full({3}, value, at::kDouble));
      value += 1;
    }
  }
  // Bit i of `used`: whether weight i is.
  at::Tensor forward(const at::Tensor& x, int used) {
    auto y = x;
    const auto weights = parameters();
    for (size_t i = 0; i < weights.size(); ++i) {
      if (used >> i & 1) y = y * weights[i];
    }
    return y;
  }
};
TORCH_MODULE(Branches);

using Model = DistributedDataParallel<Branches>;

struct Use {
  int model, weights;
};

// The forward passes of one rank in a step, and which of them the loss has.
struct Step {
  std::vector<Use> calls;
};

// By step and rank. Each rank calls each model once, in the same order.
const std::vector<std::vector<Step>> kSteps{
    // all, and all but the first weight
    {{{{0, 15}, {1, 15}}}, {{{0, 14}, {1, 15}}}},
    // all but the last
    {{{{0, 15}, {1, 15}}}, {{{0, 7}, {1, 15}}}},
    // others on each rank
    {{{{0, 1}, {1, 8}}}, {{{0, 8}, {1, 1}}}},
};

at::Tensor batch(int rank, size_t step) {
  return torch::linspace(0.5, 1 + rank + 0.1 * static_cast<double>(step), 3, at::kDouble);
}

template <typename Forward>
at::Tensor loss_of(const Step& step, const at::Tensor& x, const Forward& forward) {
  auto loss = torch::zeros({}, at::kDouble);
  for (const auto& use : step.calls) loss = loss + forward(use.model, x, use.weights).sum();
  return loss;
}

std::vector<Branches> nets() { return {Branches(0.5), Branches(1.25)}; }

std::vector<at::Tensor> gradients(const std::vector<Branches>& nets) {
  std::vector<at::Tensor> all;
  for (const auto& net : nets) {
    for (const auto& p : net->parameters()) {
      all.push_back(p.grad().defined() ? p.grad().clone() : torch::zeros_like(p));
    }
  }
  return all;
}

}  // namespace

TEST_CASE(
    "models in one loss average whatever each rank uses of them", "[ranks][ddp][shared_loss]") {
  const double cap = GENERATE(1e-6, 25.0);
  for (size_t s = 0; s < kSteps.size(); ++s) {
    auto one = nets();
    auto mean = torch::zeros({}, at::kDouble);
    for (int rank = 0; rank < 2; ++rank) {
      mean = mean +
             loss_of(kSteps[s][rank], batch(rank, s), [&](int m, const at::Tensor& x, int used) {
               return one[m]->forward(x, used);
             }) / 2;
    }
    mean.backward();
    const auto expected = gradients(one);
    const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
      const auto own = nets();
      std::vector<Model> models;
      for (const auto& net : own) {
        models.emplace_back(net, in(self).find_unused_parameters(true).bucket_cap_mb(cap));
      }
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (auto& model : models) model->zero_grad();
        auto loss = loss_of(
            kSteps[s][self.rank], batch(self.rank, s),
            [&](int m, const at::Tensor& x, int used) { return models[m]->forward(x, used); });
        if (loss.requires_grad()) loss.backward();
      }
      return gradients(own);
    });
    for (const auto& result : results) {
      for (size_t i = 0; i < result.size(); ++i) {
        INFO("step " << s << ", weight " << i << ": " << result[i] << " and " << expected[i]);
        CHECK(torch::allclose(result[i], expected[i], 1e-9, 1e-12));
      }
    }
  }
}

}  // namespace ddp::shared_loss
