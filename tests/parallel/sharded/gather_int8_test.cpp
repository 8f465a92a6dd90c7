// Gathers of parameters in one byte a value, beside a model whose weights a formula of this file
// rounds.
#include <ddp/ddp.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

/// Two weights whose border is within a block of 256 elements.
struct Pair : torch::nn::Module {
  Pair() {
    a = register_module("a", torch::nn::Linear(24, 30));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({30})));
    b = register_module("b", torch::nn::Linear(30, 24));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = b->forward(norm->forward(torch::tanh(a->forward(x)))) + x;
    if (!writes) return y;
    const torch::NoGradGuard no_grad;
    a->weight[3][5].mul_(0.5);
    return y;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  bool writes = false;
};
using PairUnit = FullyShardedDataParallel<std::shared_ptr<Pair>>;

std::shared_ptr<Pair> make_pair(uint64_t seed, at::ScalarType dtype = at::kDouble) {
  auto pair = std::make_shared<Pair>();
  draw_normal(*pair, 0.3, seed);
  pair->to(dtype);
  return pair;
}

/// The values of one unit's weights after a gather, one after another.
std::vector<at::Tensor> rounded(const std::vector<at::Tensor>& weights) {
  std::vector<at::Tensor> flat;
  for (const auto& w : weights) flat.push_back(w.detach().reshape({-1}).to(at::kFloat));
  const auto all = torch::cat(flat);
  auto result = all.clone();
  for (int64_t from = 0; from < all.numel(); from += 256) {
    const auto block = all.slice(0, from, std::min(from + 256, all.numel()));
    const auto scale = block.abs().max() / 127;
    result.slice(0, from, from + 256).copy_(torch::round(block / scale) * scale);
  }
  std::vector<at::Tensor> parts;
  int64_t from = 0;
  for (const auto& w : weights) {
    parts.push_back(result.narrow(0, from, w.numel()).view(w.sizes()).to(w.scalar_type()));
    from += w.numel();
  }
  return parts;
}

/// The same in the weights of a module, until it is destroyed.
struct Rounded {
  explicit Rounded(Pair& pair) {
    const torch::NoGradGuard no_grad;
    weights = {pair.a->weight, pair.b->weight};
    const auto values = rounded(weights);
    for (size_t i = 0; i < 2; ++i) {
      exact.push_back(weights[i].detach().clone());
      weights[i].copy_(values[i]);
    }
  }
  ~Rounded() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) weights[i].copy_(exact[i]);
  }
  std::vector<at::Tensor> weights, exact;
};

at::Tensor input_of(int64_t step, int64_t micro, int rank) {
  const auto at = static_cast<double>(step * 7 + micro * 3 + rank);
  return torch::linspace(at, at + 2, 48, torch::kDouble).sin().view({2, 24});
}

/// A sum in another order may round a scale, in float, to its neighbour.
constexpr double kOfFloats = 1e-7;

struct Use {
  FullyShardedOptions options = FullyShardedOptions();
  int64_t micro_batches = 1;
  int replicas = 1;
};

/// The largest difference between exact parameters after some steps and those of one process.
double difference(const Rank& self, const Use& use) {
  auto options = use.options;
  options.mp_policy(MixedPrecisionPolicy().gather_int8(true));
  if (use.replicas == 1) {
    options.process_group(self.group);
  } else {
    const int shards = self.size / use.replicas;
    options.mesh(init_device_mesh({use.replicas, shards}, {"replicas", "shards"}, self.group));
  }
  const std::vector<std::shared_ptr<Pair>> plain{make_pair(1), make_pair(2)};
  torch::nn::Sequential units(make_pair(1), make_pair(2));
  fully_shard_children(units, options);
  FullyShardedDataParallel model(units, options);
  std::vector<at::Tensor> masters;
  for (const auto& pair : plain) {
    for (const auto& p : pair->parameters()) masters.push_back(p);
  }
  torch::optim::SGD of_model(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD of_plain(masters, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    of_model.zero_grad();
    of_plain.zero_grad();
    for (int64_t micro = 0; micro < use.micro_batches; ++micro) {
      const auto loss = [&] {
        return model->forward(input_of(step, micro, self.rank)).pow(2).sum();
      };
      const auto without_reduction = [&] {
        const auto guard = model->no_sync();
        return loss();
      };
      (micro + 1 == use.micro_batches ? loss() : without_reduction()).backward();
      const Rounded first(*plain[0]), second(*plain[1]);
      for (int rank = 0; rank < self.size; ++rank) {
        auto x = input_of(step, micro, rank);
        for (const auto& pair : plain) x = pair->forward(x);
        (x.pow(2).sum() / self.size).backward();
      }
    }
    of_model.step();
    of_plain.step();
  }
  const SummonFullParams whole(*model);
  return largest_difference(model->parameters(), masters);
}

}  // namespace

TEST_CASE("units train with gathers in int8 as the formula says", "[int8][ranks]") {
  const int ranks = GENERATE(1, 2, 3, 5);
  Use use;
  use.options.reshard_after_forward(GENERATE(true, false)).prefetch(GENERATE(0, 1));
  use.micro_batches = GENERATE(1, 2);
  CAPTURE(ranks, use.micro_batches);
  const auto differences =
      run_ranks<double>(ranks, [&](const Rank& self) { return difference(self, use); });
  for (const auto found : differences) CHECK(found < kOfFloats);
}

TEST_CASE("replicas of shards train with gathers in int8", "[int8][ranks]") {
  Use use;
  use.replicas = 2;
  const auto differences =
      run_ranks<double>(4, [&](const Rank& self) { return difference(self, use); });
  for (const auto found : differences) CHECK(found < kOfFloats);
}

TEST_CASE("whole parameters are rounded in units, exact for the program", "[int8][ranks]") {
  const int ranks = GENERATE(1, 2, 3, 5);
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  const bool is_cast = GENERATE(false, true);
  CAPTURE(ranks, dtype, is_cast);
  const auto problems = run_ranks<std::string>(ranks, [&](const Rank& self) -> std::string {
    auto policy = MixedPrecisionPolicy().gather_int8(true);
    if (is_cast) policy.param_dtype(at::kBFloat16);
    const auto plain = make_pair(1, dtype);
    PairUnit unit(
        make_pair(1, dtype), FullyShardedOptions().process_group(self.group).mp_policy(policy));
    const auto expected = [&](bool rounds) {
      std::vector<at::Tensor> values;
      const auto weights = rounded({plain->a->weight, plain->b->weight});
      for (const auto& p : plain->parameters()) {
        const bool is_first = p.is_same(plain->a->weight);
        const auto value = !rounds || p.dim() < 2 ? p.detach() : weights[is_first ? 0 : 1];
        values.push_back(is_cast ? value.to(at::kBFloat16) : value);
      }
      return values;
    };
    const auto is_exact = [&] {
      const SummonFullParams whole(*unit);
      return all_equal(unit->parameters(), expected(false));
    };
    if (!is_exact()) return "before";
    unit->unshard();
    if (!all_equal(unit->parameters(), expected(true))) return "unsharded";
    if (!is_exact()) return "in SummonFullParams, of an unsharded unit";
    unit->reshard();
    unit->unshard();
    if (!all_equal(unit->parameters(), expected(true))) return "again";
    unit->reshard();
    const auto dict = full_state_dict(unit, 0, self.group);
    if (self.rank == 0 && !torch::equal(dict["a.weight"], plain->a->weight)) return "saved";
    return is_exact() ? "" : "after";
  });
  for (const auto& problem : problems) CHECK(problem == "");
}

TEST_CASE("a gather in int8 sends about a quarter", "[int8][ranks]") {
  const auto gathered = [](bool in_int8) {
    return run_ranks<int64_t>(2, [&](const Rank& self) {
      torch::nn::Sequential net(torch::nn::Linear(256, 256));
      FullyShardedDataParallel unit(
          net, FullyShardedOptions()
                   .process_group(self.group)
                   .mp_policy(MixedPrecisionPolicy().gather_int8(in_int8)));
      const torch::NoGradGuard no_grad;
      (void)unit->forward(torch::ones({1, 256}));
      return unit->stats().units[0].bytes;
    })[0];
  };
  CHECK(gathered(false) == 4 * (256 * 256 + 256));
  CHECK(gathered(true) == 256 * 256 + 4 * 256 + 4 * 256);  // a scale a block, and the bias
}

TEST_CASE("values that are not finite stay so in a gather in int8", "[int8][ranks]") {
  const auto value =
      GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  const auto counts = run_ranks<std::vector<int64_t>>(2, [&](const Rank& self) {
    const auto pair = make_pair(1, at::kFloat);
    {
      const torch::NoGradGuard no_grad;
      pair->b->weight[29 % 24][29] = value;
    }
    PairUnit unit(
        pair, FullyShardedOptions()
                  .process_group(self.group)
                  .mp_policy(MixedPrecisionPolicy().gather_int8(true)));
    unit->unshard();
    int64_t rounded_ones = 0, exact_ones = 0;
    for (const auto& p : unit->parameters()) rounded_ones += p.isnan().sum().item<int64_t>();
    unit->reshard();
    const SummonFullParams whole(*unit);
    for (const auto& p : unit->parameters()) {
      exact_ones += p.isfinite().logical_not().sum().item<int64_t>();
    }
    return std::vector<int64_t>{rounded_ones, exact_ones};
  });
  for (const auto& count : counts) CHECK(count == std::vector<int64_t>{256, 1});
}

TEST_CASE("what forward writes is kept, and no rounding", "[int8][ranks]") {
  const int ranks = GENERATE(1, 2, 3);
  const auto right = run_ranks<int>(ranks, [](const Rank& self) {
    const auto exact = make_pair(1), pair = make_pair(1);
    pair->writes = true;
    PairUnit unit(
        pair, FullyShardedOptions()
                  .process_group(self.group)
                  .mp_policy(MixedPrecisionPolicy().gather_int8(true)));
    const torch::NoGradGuard no_grad;
    const auto was = rounded({exact->a->weight, exact->b->weight})[0][3][5] * 0.5;
    (void)unit->forward(input_of(0, 0, 0));
    exact->a->weight[3][5] = was;
    const SummonFullParams whole(*unit);
    return all_equal(unit->parameters(), exact->parameters()) ? 1 : 0;
  });
  CHECK(right == std::vector<int>(static_cast<size_t>(ranks), 1));
}

TEST_CASE("names of keep_float are gathered exactly", "[int8][ranks]") {
  const auto right = run_ranks<int>(2, [](const Rank& self) {
    const auto exact = make_pair(1);
    PairUnit unit(
        make_pair(1), FullyShardedOptions()
                          .process_group(self.group)
                          .mp_policy(MixedPrecisionPolicy().gather_int8(true).keep_float({"b"})));
    unit->unshard();
    const auto b = unit->module()->b->weight.detach().clone();
    const auto a = unit->module()->a->weight.detach().clone();
    unit->reshard();
    return all_equal({b, a}, {exact->b->weight, rounded({exact->a->weight})[0]}) ? 1 : 0;
  });
  CHECK(right == std::vector<int>{1, 1});
}

TEST_CASE("ranks that gather in different forms are an error", "[int8][errors][ranks]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    PairUnit unit(
        make_pair(1), FullyShardedOptions()
                          .process_group(self.group)
                          .mp_policy(MixedPrecisionPolicy().gather_int8(self.rank == 1)));
  });
  CHECK_THAT(
      error, ContainsText("expected the same parameters on every rank, got a.weight [30, 24] "
                          "Double on rank 0 and a.weight [30, 24] Double in int8 on rank 1"));
}

TEST_CASE("a small transformer learns alike with gathers in int8", "[int8][ranks]") {
  const auto mean_loss = [](bool in_int8) {
    return run_ranks<double>(1, [&](const Rank& self) {
      const auto options = FullyShardedOptions()
                               .process_group(self.group)
                               .mp_policy(MixedPrecisionPolicy().gather_int8(in_int8));
      torch::nn::Sequential net(torch::nn::Embedding(16, 32));
      for (int i = 0; i < 2; ++i) {
        net->push_back(torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(32, 2).dim_feedforward(64).dropout(0)));
      }
      net->push_back(torch::nn::Linear(32, 16));
      draw_normal(*net, 0.1, 3);
      fully_shard_children(net, options);
      FullyShardedDataParallel model(net, options);
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-3));
      double sum = 0;
      for (int step = 0; step < 300; ++step) {
        auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
        const auto starts = torch::randint(0, 16, {1, 8}, generator, torch::kLong);
        const auto noise = torch::randint(0, 3, {10, 8}, generator, torch::kLong);
        const auto tokens = (starts + torch::cat({starts * 0, noise.cumsum(0)})) % 16;
        optimizer.zero_grad();
        const auto scores = model->forward(tokens.narrow(0, 0, 10)).flatten(0, 1);
        const auto loss =
            torch::nn::functional::cross_entropy(scores, tokens.narrow(0, 1, 10).flatten());
        loss.backward();
        optimizer.step();
        if (step >= 200) sum += loss.item<double>();
      }
      return sum / 100;
    })[0];
  };
  const auto exact = mean_loss(false), in_int8 = mean_loss(true);
  CAPTURE(exact, in_int8);
  CHECK(exact < 1.5);  // of log(16) at first; three next tokens are equally likely
  CHECK(std::abs(in_int8 - exact) < 0.005 * exact);
}

}  // namespace ddp::testing
