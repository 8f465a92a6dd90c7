// Gradients of layers whose backward passes send some of them while they compute others, beside the
// layers of autograd's own nodes, which do one after the other.
#include <optional>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;
using torch::Tensor;
namespace functional = ddp::functional;

namespace {

struct Layer {
  bool sequence = false;
  bool bias = true;
  bool trains_weight = true;
  bool autocast = false;
  at::ScalarType type = torch::kFloat;
  std::vector<int64_t> input = {6, 2, 12};  // of a rank
};

/// The layer's function, by nodes that know nothing of each other.
Tensor apart(
    const Layer& layer, const Tensor& x, const Tensor& w, const Tensor& b,
    const ddp::ProcessGroup& group) {
  const auto entered =
      layer.sequence ? functional::all_gather(x, 0, group) : functional::copy_to_region(x, group);
  return torch::linear(entered, w, b);
}

/// Output and gradients of the input, the weight and the bias; then those of a function of the
/// first gradients, with `twice`.
std::vector<Tensor> results_of(const Layer& layer, bool by_layer, bool twice, const Rank& self) {
  const auto whole_w = draw_values({8 * self.size, 12}, 1).to(layer.type);
  const auto whole_b = layer.bias ? draw_values({8 * self.size}, 2).to(layer.type) : Tensor();
  ddp::ColumnParallelLinear column(
      ddp::ColumnParallelLinearOptions(12, 8 * self.size)
          .bias(layer.bias)
          .sequence_parallel(layer.sequence)
          .process_group(self.group),
      whole_w, whole_b);
  column->weight.requires_grad_(layer.trains_weight);
  const uint64_t seed = layer.sequence ? 3 + static_cast<uint64_t>(self.rank) : 3;
  const auto x = draw_values(layer.input, seed).to(layer.type).requires_grad_();
  std::vector<Tensor> leaves{x};
  if (layer.trains_weight) leaves.push_back(column->weight);
  if (layer.bias) leaves.push_back(column->bias);

  Tensor y;
  {
    std::optional<ddp::AutocastGuard> guard;
    if (layer.autocast) guard.emplace(torch::kCPU);
    y = by_layer ? column->forward(x) : apart(layer, x, column->weight, column->bias, self.group);
  }
  const auto weights = draw_values(y.sizes().vec(), 4).to(y.scalar_type());
  auto results = torch::autograd::grad({(y * y * weights).sum()}, leaves, {}, twice, twice);
  results.push_back(y.detach());
  if (!twice) return results;
  const auto loss = (results[0] * results[0]).sum() + (results[1] * results[1]).sum();
  for (const auto& second : torch::autograd::grad({loss}, leaves, {}, {}, false, true)) {
    if (second.defined()) results.push_back(second);
  }
  return results;
}

std::string name_of(const Layer& layer, bool twice) {
  return ddp::str(
      "sequence ", layer.sequence, ", bias ", layer.bias, ", trains ", layer.trains_weight,
      ", autocast ", layer.autocast, ", ", layer.type, ", input ", layer.input, ", twice ", twice);
}

/// To the bit; gradients of gradients are sums that autograd adds up in another order.
bool is_alike(
    const std::vector<Tensor>& got, const std::vector<Tensor>& expected, const Layer& layer,
    bool twice) {
  if (got.size() != expected.size()) return false;
  const double epsilon = layer.type == torch::kDouble ? 1e-12 : 1e-4;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].scalar_type() != expected[i].scalar_type()) return false;
    if (got[i].sizes() != expected[i].sizes()) return false;
    if (twice ? !got[i].allclose(expected[i], epsilon, epsilon) : !got[i].equal(expected[i])) {
      return false;
    }
  }
  return true;
}

std::vector<Layer> layers() {
  std::vector<Layer> all;
  for (const bool sequence : {false, true}) {
    for (const bool bias : {false, true}) {
      for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
        all.push_back({sequence, bias, true, false, type});
      }
      all.push_back({sequence, bias, false});
      all.push_back({sequence, bias, true, false, torch::kFloat, {7, 12}});
      all.push_back({sequence, bias, true, false, torch::kFloat, {2, 3, 2, 12}});
      all.push_back({sequence, bias, true, false, torch::kFloat, {0, 12}});
    }
  }
  all.push_back({false, true, true, /*autocast=*/true});
  all.push_back({false, true, true, false, torch::kFloat, {12}});
  return all;
}

}  // namespace

TEST_CASE(
    "a column layer has the bits of a linear layer after its exchange",
    "[parallel][tensor][ranks]") {
  const int ranks = GENERATE(1, 2, 3);
  const bool twice = GENERATE(false, true);
  const auto faults = run_ranks<std::string>(ranks, [&](const Rank& self) {
    std::string differing;
    for (const auto& layer : layers()) {
      // Sums of second derivatives cancel beyond what 16 bits have.
      if (twice && (!layer.trains_weight || layer.type == torch::kBFloat16)) continue;
      const auto got = results_of(layer, true, twice, self);
      const auto expected = results_of(layer, false, twice, self);
      if (!is_alike(got, expected, layer, twice)) differing += name_of(layer, twice) + "\n";
    }
    return differing;
  });
  for (const auto& differing : faults) CHECK(differing == "");
}
