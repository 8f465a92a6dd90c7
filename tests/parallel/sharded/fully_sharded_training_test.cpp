// A sharded model with what else a training loop has: clipping, scaling, normalization, autocast;
// and what is refused.
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "parallel/sharded/summoned.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

// A rank without input cannot answer gathers, and shards have nothing that ZeRO could divide.
static_assert(!std::is_base_of_v<ddp::Joinable, ddp::FullyShardedBase>);
static_assert(!std::is_constructible_v<
              ddp::ZeroRedundancyOptimizer<torch::optim::SGD>, FullyShardedDataParallel<Block>,
              torch::optim::SGDOptions>);

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

FullyShardedOptions sharded_over(const Rank& self) {
  return FullyShardedOptions().process_group(self.group);
}

using ShardedModel = FullyShardedDataParallel<std::shared_ptr<ShardedNet>>;

ShardedModel sharded_net(const FullyShardedOptions& options) {
  NetUse use;
  use.options = options;
  return ShardedModel(std::make_shared<ShardedNet>(use), options);
}

at::Tensor rank_loss(ShardedModel& model, int64_t step, int rank) {
  return model->forward(net_input({}, step, 0, rank), rank);
}

/// Norms of the gradients of three steps, and the parameters after them.
struct Clipped {
  std::vector<double> norms;
  NamedValues values;
};

template <typename Loss, typename Clip>
std::vector<double> steps_with_clipping(
    const std::vector<at::Tensor>& parameters, const Loss& loss, const Clip& clip) {
  auto optimizer = net_optimizer(parameters);
  std::vector<double> norms;
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(step).backward();
    norms.push_back(clip());
    optimizer.step();
  }
  return norms;
}

/// In one process, with the batches of all ranks.
Clipped clip_whole(int ranks, double max_norm, double norm_type) {
  PlainNet net{NetUse()};
  const auto loss = [&](int64_t step) {
    auto sum = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < ranks; ++rank) {
      sum = sum + net.forward(net_input({}, step, 0, rank), rank) / ranks;
    }
    return sum;
  };
  const auto clip = [&] {
    return torch::nn::utils::clip_grad_norm_(net.parameters(), max_norm, norm_type);
  };
  auto norms = steps_with_clipping(net.parameters(), loss, clip);
  return {std::move(norms), named_values(net)};
}

std::string difference_between(const Clipped& a, const Clipped& b) {
  for (size_t i = 0; i < a.norms.size(); ++i) {
    const auto difference = std::abs(a.norms[i] - b.norms[i]);
    if (!(difference < 1e-12 * (1 + b.norms[i]))) {
      return c10::str("norm ", i, ": ", a.norms[i], " and ", b.norms[i]);
    }
  }
  const auto difference = largest_difference(a.values, b.values);
  return difference < 1e-12 ? "" : c10::str("values differ by ", difference);
}

/// Two layers with a normalization between them.
template <typename Norm>
struct NormedNet : torch::nn::Module {
  explicit NormedNet(Norm made)
      : up(register_module("up", torch::nn::Linear(3, 4))),
        norm(register_module("norm", std::move(made))),
        down(register_module("down", torch::nn::Linear(4, 2))) {
    to(torch::kDouble);
    draw_normal(*this, 0.5, 6);
  }
  at::Tensor forward(const at::Tensor& x) {
    return down->forward(torch::tanh(norm->forward(up->forward(x))));
  }
  torch::nn::Linear up;
  Norm norm;
  torch::nn::Linear down;
};

at::Tensor normal_input(int64_t samples, int64_t width, int64_t step) {
  return draw_values({samples, width}, static_cast<uint64_t>(50 + step));
}

/// Three steps on batches of 8 samples, of which a rank has `part` of `parts`.
template <typename Forward>
void train_on_part(
    const std::vector<at::Tensor>& parameters, int part, int parts, const Forward& forward) {
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const auto batch = normal_input(8, 3, step).chunk(parts)[static_cast<size_t>(part)];
    forward(batch).pow(2).mean().backward();
    optimizer.step();
  }
}

/// Steps with an infinity in the shard of rank 1, and without. \return "" or what is wrong.
template <typename Sgd>
std::string step_with_infinity(const Rank& self) {
  torch::nn::Linear layer(4, 3);
  draw_normal(*layer, 0.5, 1);
  FullyShardedDataParallel model(layer, sharded_over(self));
  Sgd optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  ddp::GradScaler scaler(ddp::GradScalerOptions().init_scale(4).found_inf_groups({self.group}));
  const auto step = [&](double factor) {
    optimizer.zero_grad();
    const auto y = model->forward(torch::ones({2, 4}));
    // The last row, which rank 1 has.
    scaler.scale((y.select(1, 2) * factor).sum()).backward();
    const bool has_infinity = layer->weight.grad().isinf().any().item<bool>();
    if (has_infinity != (factor > 1 && self.rank == 1)) throw std::runtime_error("no infinity");
    const bool has_stepped = scaler.step(optimizer);
    scaler.update();
    return has_stepped;
  };
  const auto before = summoned_values(*model);
  if (step(1e38)) return "stepped";
  if (largest_difference(summoned_values(*model), before) != 0) return "changed";
  if (scaler.get_scale() != 2) return "another scale";
  if (!step(1)) return "skipped";
  auto expected = before;
  expected["weight"][2] -= 0.2;
  expected["bias"][2] -= 0.2;
  return largest_difference(summoned_values(*model), expected) < 1e-6 ? "" : "other values";
}

}  // namespace

TEST_CASE("clipping a sharded model is clipping the whole one", "[ranks][sharded]") {
  const int ranks = GENERATE(1, 2, 4);  // on 4, some ranks have no element of some parameters
  const double norm_type = GENERATE(1.0, 2.0, kInfinity);
  const double max_norm = 0.05;
  const auto whole = clip_whole(ranks, max_norm, norm_type);
  CHECK(whole.norms[0] > max_norm);
  const auto faults = run_ranks<std::string>(ranks, [&](const Rank& self) {
    auto model = sharded_net(sharded_over(self));
    const auto loss = [&](int64_t step) { return rank_loss(model, step, self.rank); };
    const auto clip = [&] { return ddp::clip_grad_norm_(*model, max_norm, norm_type); };
    auto norms = steps_with_clipping(model->parameters(), loss, clip);
    return difference_between({std::move(norms), summoned_values(*model)}, whole);
  });
  CHECK(faults == std::vector<std::string>(static_cast<size_t>(ranks)));
}

TEST_CASE("clipping counts the replicas of a shard once", "[ranks][sharded]") {
  const bool by_mesh = GENERATE(true, false);
  const auto whole = clip_whole(4, 0.05, 2);
  const auto faults = run_ranks<std::string>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"replicate", "shard"}, self.group);
    auto model = sharded_net(FullyShardedOptions().mesh(mesh));
    const auto loss = [&](int64_t step) { return rank_loss(model, step, self.rank); };
    const auto clip = [&] {
      return by_mesh ? ddp::clip_grad_norm_(*model, 0.05, mesh)
                     : ddp::clip_grad_norm_(*model, 0.05);
    };
    auto norms = steps_with_clipping(model->parameters(), loss, clip);
    return difference_between({std::move(norms), summoned_values(*model)}, whole);
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE("gradients that are not final are not clipped", "[ranks][sharded][errors]") {
  using Texts = std::vector<std::string>;
  const auto errors = run_ranks<Texts>(2, [](const Rank& self) {
    auto model = sharded_net(sharded_over(self));
    const auto clip = [](const torch::nn::Module& module) {
      return error_of<c10::Error>([&] { ddp::clip_grad_norm_(module, 1.0); });
    };
    {
      const auto guard = model->no_sync();
      rank_loss(model, 0, self.rank).backward();
    }
    Texts texts{clip(*model), clip(*model->module()->block1)};
    rank_loss(model, 1, self.rank).backward();
    texts.push_back(clip(*model));
    const ddp::SummonFullParams whole(*model);
    texts.push_back(clip(*model));
    return texts;
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto expected = [&](const std::string& unit) {
      return c10::str(
          "clip_grad_norm_: expected gradients to be final, got ", unit,
          " with whole gradients from no_sync() on rank ", rank,
          " of 2. Run a backward outside no_sync() before.");
    };
    CHECK(errors[rank][0] == expected("the root"));
    CHECK(errors[rank][1] == expected("block1"));
    CHECK(errors[rank][2].empty());
    CHECK_THAT(errors[rank][3], ContainsText("Clip outside of SummonFullParams"));
  }
}

TEST_CASE("an infinity in one rank's shard skips the step on all", "[ranks][sharded]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) {
    return step_with_infinity<torch::optim::SGD>(self) + step_with_infinity<ddp::optim::SGD>(self);
  });
  CHECK(faults == std::vector<std::string>(2));
}

TEST_CASE("fused optimizers step shards as LibTorch's do", "[ranks][sharded]") {
  const auto run = [](const Rank& self, auto make) {
    auto model = sharded_net(sharded_over(self));
    const auto optimizer = make(model->parameters());
    for (int64_t step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      rank_loss(model, step, self.rank).backward();
      optimizer->step();
    }
    return summoned_values(*model);
  };
  const auto options = torch::optim::AdamWOptions(0.02).weight_decay(0.1);
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    return largest_difference(
        run(self, [&](const auto& p) { return std::make_unique<ddp::optim::AdamW>(p, options); }),
        run(self,
            [&](const auto& p) { return std::make_unique<torch::optim::AdamW>(p, options); }));
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("a SyncBatchNorm in a unit normalizes over the whole batch", "[ranks][sharded]") {
  const int ranks = GENERATE(1, 2);
  NormedNet<torch::nn::BatchNorm1d> whole{torch::nn::BatchNorm1d(4)};
  train_on_part(whole.parameters(), 0, 1, [&](const at::Tensor& x) { return whole.forward(x); });
  const auto expected = named_values(whole);
  const auto distances = run_ranks<double>(ranks, [&](const Rank& self) {
    using Net = NormedNet<ddp::SyncBatchNorm1d>;
    FullyShardedDataParallel model(
        std::make_shared<Net>(
            ddp::SyncBatchNorm1d(ddp::SyncBatchNormOptions(4).process_group(self.group))),
        sharded_over(self));
    train_on_part(model->parameters(), self.rank, self.size, [&](const at::Tensor& x) {
      return model->forward(x);
    });
    return largest_difference(summoned_values(*model), expected);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("autocast around a sharded model is as around a whole one", "[ranks][sharded]") {
  using Net = NormedNet<torch::nn::LayerNorm>;
  const auto make = [] {
    auto net = std::make_shared<Net>(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    net->to(torch::kFloat);
    return net;
  };
  const auto computed = [](auto& net, const at::Tensor& x) {
    const ddp::AutocastGuard autocast(torch::kCPU, ddp::AutocastOptions().dtype(torch::kBFloat16));
    const auto y = net.forward(x.to(torch::kFloat));
    TORCH_CHECK(y.scalar_type() == torch::kBFloat16, y.scalar_type());
    return y.to(torch::kFloat);
  };
  const auto whole = make();
  train_on_part(whole->parameters(), 0, 1, [&](const at::Tensor& x) {
    const auto parts = x.chunk(2);
    return torch::cat({computed(*whole, parts[0]), computed(*whole, parts[1])});
  });
  const auto expected = named_values(*whole);
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    // A region around all steps keeps casts of parameters, which must not outlive a step.
    const ddp::AutocastGuard around_all(
        torch::kCPU, ddp::AutocastOptions().dtype(torch::kBFloat16));
    FullyShardedDataParallel model(make(), sharded_over(self));
    train_on_part(model->parameters(), self.rank, 2, [&](const at::Tensor& x) {
      return computed(*model, x);
    });
    return largest_difference(summoned_values(*model), expected);
  });
  for (const auto distance : distances) CHECK(distance < 1e-6);
}

TEST_CASE("replicas_equal compares the replicas of shards", "[ranks][sharded]") {
  const auto faults = run_ranks<std::string>(4, [](const Rank& self) -> std::string {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"replicate", "shard"}, self.group);
    auto model = sharded_net(FullyShardedOptions().mesh(mesh));
    rank_loss(model, 0, self.rank).backward();
    net_optimizer(model->parameters()).step();
    const auto replicas = mesh.group("replicate");
    if (!ddp::replicas_equal(*model, replicas)) return "differ";
    if (!ddp::replicas_equal(*model, mesh.group("shard"))) return "shards are compared";
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.add_(mesh.rank("replicate"));
    return ddp::replicas_equal(*model, replicas) ? "are the same" : "";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE("wrappers that both average are refused", "[ranks][sharded][errors]") {
  using Texts = std::vector<std::string>;
  struct Around : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  const auto errors = run_ranks<Texts>(2, [](const Rank& self) {
    const auto call = [](const auto& body) { return error_of<c10::Error>(body); };
    const auto replicated = ddp::DistributedDataParallelOptions().process_group(self.group);
    const auto alone = ddp::split_group(self.rank, 0, self.group);
    const auto net_with_units = [&](const ddp::ProcessGroup& group) {
      NetUse use;
      use.options.process_group(group);
      return std::make_shared<ShardedNet>(use);
    };
    // Made out here: who drops one while an exception is on its way ends the job.
    const auto cut = net_with_units(self.group);
    const auto cut_alone = net_with_units(alone);
    const FullyShardedDataParallel unit(Block(), sharded_over(self));
    const auto around = std::make_shared<Around>();
    around->register_module(
        "inner", ddp::DistributedDataParallel(torch::nn::Linear(2, 2), replicated));
    return Texts{
        call([&] { ddp::DistributedDataParallel model(cut, replicated); }),
        call([&] { ddp::DistributedDataParallel model(cut_alone, replicated); }),
        call([&] { ddp::DistributedDataParallel model(unit, replicated); }),
        call([&] { FullyShardedDataParallel model(around, sharded_over(self)); }),
    };
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto& texts = errors[rank];
    const auto where = c10::str(" on rank ", rank, " of 2.");
    CHECK_THAT(texts[0], ContainsText("\"block1\" is a FullyShardedDataParallel" + where));
    CHECK_THAT(texts[1], ContainsText("\"block1\" is a FullyShardedDataParallel" + where));
    CHECK_THAT(texts[2], ContainsText("but it is a FullyShardedDataParallel" + where));
    CHECK_THAT(texts[3], ContainsText("but inner is a DistributedDataParallel on rank 0 of 2."));
  }
}

TEST_CASE("sparse gradients are refused", "[ranks][sharded][errors]") {
  using Texts = std::vector<std::string>;
  /// Asks for sparse gradients, which no option of a module says.
  struct Lookup : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return at::embedding(table, x, -1, false, true); }
    at::Tensor table{register_parameter("table", torch::ones({5, 3}))};
  };
  const auto errors = run_ranks<Texts>(2, [](const Rank& self) {
    const auto sparse = [] {
      return torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    };
    const auto call = [](const auto& body) { return error_of<c10::Error>(body); };
    const auto x = torch::arange(3);
    Texts texts;
    texts.push_back(call([&] {
      FullyShardedDataParallel model(torch::nn::Sequential(sparse()), sharded_over(self));
    }));
    FullyShardedDataParallel model(std::make_shared<Lookup>(), sharded_over(self));
    texts.push_back(call([&] { model->forward(x).sum().backward(); }));
    const auto left = model->parameters()[0];
    texts.push_back(left.grad().defined() || left.size(0) != 1 ? "changed" : "");
    auto frozen = sparse();
    frozen->weight.requires_grad_(false);
    FullyShardedDataParallel(frozen, sharded_over(self))->forward(x);
    FullyShardedDataParallel(sparse(), sharded_over(self).ignored_parameters({"weight"}))
        ->forward(x)
        .sum()
        .backward();
    return texts;
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        errors[rank][0], ContainsText("got 0.weight, whose are sparse, on rank 0 of 2. Make the "
                                      "Embedding with sparse(false)"));
    CHECK_THAT(
        errors[rank][1],
        ContainsText("expected dense gradients, got a Sparse one of table in the root on rank "));
    CHECK(errors[rank][2].empty());
  }
}

TEST_CASE("a BatchNorm in a unit is converted before", "[ranks][sharded][errors]") {
  // The units are the inner Sequential, or each of the parts.
  const auto [least, units] =
      GENERATE(std::pair<int64_t, int64_t>(10, 1), std::pair<int64_t, int64_t>(4, 3));
  const auto errors = errors_of_ranks(2, [least = least, units = units](const Rank& self) {
    struct Inner : torch::nn::SequentialImpl {
      using SequentialImpl::SequentialImpl;
      at::Tensor forward(at::Tensor x) { return SequentialImpl::forward(x); }
    };
    torch::nn::Sequential net(
        std::make_shared<Inner>(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3)),
        torch::nn::Linear(3, 1));
    TORCH_CHECK(ddp::fully_shard(net, least, sharded_over(self)) == units);
    ddp::convert_sync_batchnorm(net, self.group);
  });
  for (const auto& error : errors) {
    if (least == 10) {
      CHECK_THAT(error, ContainsText("to be an element of a Sequential, got 0.1"));
    } else {
      CHECK_THAT(error, ContainsText("expected parts that are not wrapped yet, got 0.1, a unit"));
    }
  }
}

TEST_CASE(
    "state of an optimizer that stepped a whole model is refused", "[ranks][sharded][errors]") {
  const bool has_state = GENERATE(true, false);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Block block;
    torch::optim::Adam optimizer(block->parameters(), torch::optim::AdamOptions(0.1));
    const auto step = [&](const at::Tensor& y) {
      y.sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    if (has_state) step(block->forward(torch::ones({2, kIn})));
    FullyShardedDataParallel model(block, sharded_over(self));
    step(model->forward(torch::ones({2, kIn})));
  });
  for (const auto& error : errors) {
    if (has_state) {
      CHECK_THAT(error, ContainsText("size of tensor"));
    } else {
      CHECK(error.empty());
    }
  }
}
