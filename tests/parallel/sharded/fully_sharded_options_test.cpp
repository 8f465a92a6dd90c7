// Options and the other calls of FullyShardedDataParallel.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "support/archives.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

template <typename Optimizer>
void train(Optimizer& optimizer, const std::function<at::Tensor(int64_t)>& loss) {
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(step).backward();
    optimizer.step();
  }
}

/// One process that trains on the inputs of all ranks.
template <typename Optimizer>
std::vector<at::Tensor> train_plain(PlainNet& net, Optimizer&& optimizer, int ranks) {
  train(optimizer, [&](int64_t step) {
    auto sum = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < ranks; ++rank) {
      sum = sum + net.forward(net_input(net.use, step, 0, rank), rank) / ranks;
    }
    return sum;
  });
  return net.parameters();
}

/// A Sequential that fits into another one.
struct Inner : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(at::Tensor x) { return SequentialImpl::forward(x); }
};

torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(0.01).weight_decay(0.1); }

}  // namespace

TEST_CASE("AdamW steps shards as it steps whole parameters", "[ranks][sharded]") {
  const int ranks = GENERATE(2, 4);  // on 4, some ranks have no element of some parameters
  PlainNet net{NetUse()};
  const auto whole = train_plain(net, torch::optim::AdamW(net.parameters(), adamw()), ranks);
  const auto distances = run_ranks<double>(ranks, [&](const Rank& self) {
    NetRun run(self, over(self));
    torch::optim::AdamW optimizer(run.model->parameters(), adamw());
    train(optimizer, [&](int64_t step) { return run.loss(step); });
    return distance(*run.model, whole);
  });
  for (const auto largest : distances) CHECK(largest < 1e-9);
}

TEST_CASE("hybrid sharding trains as one process", "[ranks][sharded]") {
  PlainNet net{NetUse()};
  const auto whole = train_plain(net, net_optimizer(net.parameters()), 4);
  const auto distances = run_ranks<double>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"replicate", "shard"}, self.group);
    std::optional<ddp::FullyShardedDataParallel<torch::nn::Linear>> of_one_replica;
    if (mesh.group("replicate")->getRank() == 0) {
      of_one_replica.emplace(
          torch::nn::Linear(3, 3), FullyShardedOptions().process_group(mesh.group("shard")));
    }
    NetUse use;
    use.options.mesh(mesh);
    NetRun run(self, use);
    auto optimizer = net_optimizer(run.model->parameters());
    train(optimizer, [&](int64_t step) { return run.loss(step); });
    for (const auto& layout : ddp::layouts_of(*run.model)) {
      TORCH_CHECK(layout.sharded_over.size() == 1 && layout.replicated_over.size() == 1);
    }
    return distance(*run.model, whole);
  });
  for (const auto largest : distances) CHECK(largest < 1e-12);
}

TEST_CASE("a policy computes in low precision and sums in the module's", "[ranks][sharded]") {
  PlainNet net{NetUse()};
  const auto whole = train_plain(net, net_optimizer(net.parameters()), 2);
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    NetUse use;
    use.checkpoint = NetUse::Checkpoint::Inside;
    use.options = over(self).mp_policy(ddp::MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
    NetRun run(self, use);
    auto& block = run.model->module()->block1;
    {
      const ddp::SummonFullParams low(*block);
      TORCH_CHECK(block->module()->up->weight.scalar_type() == torch::kBFloat16);
    }
    auto optimizer = net_optimizer(run.model->parameters());
    train(optimizer, [&](int64_t step) { return run.loss(step); });
    double largest = 0;
    for (const auto& p : run.model->parameters()) {
      TORCH_CHECK(p.scalar_type() == torch::kDouble && p.grad().scalar_type() == torch::kDouble);
    }
    largest = distance(*run.model, whole);
    TORCH_CHECK(largest > 1e-9, "nothing was computed in bfloat16");
    return largest;
  });
  for (const auto largest : distances) CHECK(largest < 0.05);
}

TEST_CASE("a policy keeps named parameters and casts outputs", "[ranks][sharded]") {
  struct Normed : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const auto y = fc->forward(x);
      dtypes = {x.scalar_type(), y.scalar_type(), norm->weight.scalar_type()};
      return norm->forward(y);
    }
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(3, 4))};
    torch::nn::LayerNorm norm{
        register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})))};
    std::vector<at::ScalarType> dtypes;
  };
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto policy = ddp::MixedPrecisionPolicy()
                            .param_dtype(torch::kBFloat16)
                            .reduce_dtype(torch::kBFloat16)
                            .output_dtype(torch::kDouble)
                            .keep_float({"norm"});
    FullyShardedDataParallel model(std::make_shared<Normed>(), over(self).mp_policy(policy));
    const auto y = model->forward(torch::ones({2, 3}) * (self.rank + 1));
    TORCH_CHECK(y.scalar_type() == torch::kDouble, y.scalar_type());
    using Dtypes = std::vector<at::ScalarType>;
    const Dtypes expected{torch::kBFloat16, torch::kBFloat16, torch::kFloat};
    TORCH_CHECK(model->module()->dtypes == expected, model->module()->dtypes);
    y.pow(3).sum().backward();
    for (const auto& p : model->parameters()) {
      TORCH_CHECK(p.scalar_type() == torch::kFloat && p.grad().scalar_type() == torch::kFloat);
    }
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("collectives of a step are two gathers and one reduction a unit", "[ranks][sharded]") {
  const auto counted = [](const NetUse& use, int64_t steps) {
    return run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
      auto mine = use;
      mine.options.process_group(self.group);
      NetRun run(self, mine);
      for (int64_t step = 0; step < steps; ++step) run.loss(step).backward();
      std::vector<std::string> counts;
      for (const auto& unit : run.model->stats().units) {
        counts.push_back(c10::str(unit.name, ":", unit.gathers, "+", unit.reductions));
      }
      return counts;
    })[1];
  };
  using Counts = std::vector<std::string>;
  NetUse use;
  CHECK(counted(use, 2) == Counts{":2+2", "block1:4+2", "block2:4+2", "block3:4+2"});
  use.options.reshard_after_forward(false);
  CHECK(counted(use, 2) == Counts{":2+2", "block1:2+2", "block2:2+2", "block3:2+2"});
  use = NetUse();
  use.twice = true;
  CHECK(counted(use, 1)[1] == "block1:4+1");
  use = NetUse();
  use.checkpoint = NetUse::Checkpoint::Around;
  CHECK(counted(use, 1)[2] == "block2:2+1");
}

TEST_CASE("fully_shard makes units of parts of a Sequential", "[ranks][sharded]") {
  const auto make = [] {
    torch::nn::Sequential net(
        torch::nn::Linear(4, 8), torch::nn::ReLU(),
        std::make_shared<Inner>(
            torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2)),
        torch::nn::Linear(2, 1));
    net->to(torch::kDouble);
    draw_normal(*net, 0.5, 3);
    return net;
  };
  auto whole = make();
  const auto input = [](int rank) { return torch::ones({2, 4}, torch::kDouble) * (rank + 1); };
  ((whole->forward(input(0)) + whole->forward(input(1))).sum() / 2).backward();
  std::vector<at::Tensor> stepped;
  for (const auto& p : whole->parameters()) stepped.push_back(p.detach() - p.grad() * 0.1);
  const auto results = run_ranks<double>(2, [&](const Rank& self) {
    auto net = make();
    TORCH_CHECK(ddp::fully_shard(net, 72, over(self)) == 1);  // the inner 8 x 8
    TORCH_CHECK(ddp::fully_shard(net, 18, over(self)) == 2);  // the 4 x 8, and what is left inside
    FullyShardedDataParallel model(net, over(self));
    std::vector<std::string> names;
    for (const auto& item : model->named_parameters()) names.push_back(item.key());
    std::vector<std::string> plain_names;
    for (const auto& item : make()->named_parameters()) plain_names.push_back(item.key());
    TORCH_CHECK(names == plain_names, names);
    model->forward(input(self.rank)).sum().backward();
    torch::optim::SGD(model->parameters(), 0.1).step();
    return distance(*model, stepped);
  });
  for (const auto largest : results) CHECK(largest < 1e-12);
}

TEST_CASE("a summoned model can be changed", "[ranks][sharded]") {
  const auto means = run_ranks<double>(3, [](const Rank& self) {
    NetRun run(self, over(self));
    const auto fill = [&](double value, bool write_back) {
      const ddp::SummonFullParams whole(*run.model, write_back);
      const torch::NoGradGuard no_grad;
      for (auto& p : run.model->parameters()) p.fill_(value);
    };
    fill(2, true);
    fill(3, false);
    const ddp::SummonFullParams whole(*run.model);
    double sum = 0;
    for (const auto& p : run.model->parameters()) sum += p.mean().item<double>();
    return sum / static_cast<double>(run.model->parameters().size());
  });
  CHECK(means == std::vector<double>{2, 2, 2});
}

TEST_CASE("buffers are rank 0's after a step", "[ranks][sharded]") {
  const auto means = run_ranks<double>(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    FullyShardedDataParallel model(net, over(self));
    model->forward(torch::randn({4, 2}) + self.rank).sum().backward();
    return model->named_buffers()["1.running_mean"].sum().item<double>();
  });
  CHECK(means[0] == means[1]);
}

TEST_CASE("inference mode and a file of the plain model", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetUse use;
    use.checkpoint = NetUse::Checkpoint::Around;  // which compares the versions of parameters
    use.options = over(self);
    NetRun run(self, use);
    auto other = std::make_shared<PlainNet>(NetUse());
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : other->parameters()) p.mul_(2);
    }
    auto archive = reread(*other);
    run.model->load(archive);
    const auto x = net_input(use, 0, 0, self.rank);
    const auto expected = other->forward(x, self.rank).item<double>();
    {
      const c10::InferenceMode guard;
      TORCH_CHECK(run.model->forward(x, self.rank).item<double>() == expected);
    }
    run.loss(0).backward();
    TORCH_CHECK(run.loss(0).item<double>() == expected);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a forward without backward changes nothing", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetRun run(self, over(self));
    (void)run.loss(3);
    for (const auto& p : run.model->parameters()) TORCH_CHECK(p.dim() < 2 || p.size(0) == 1);
    torch::OrderedDict<std::string, at::Tensor> values;
    PlainNet other{NetUse()};
    for (const auto& item : other.named_parameters()) {
      values.insert(item.key(), item.value().detach() * 3);
    }
    ddp::load_full_state_dict(*run.model, values, self.group);
    run.loss(0).backward();
    std::vector<at::Tensor> expected;
    for (const auto& p : other.parameters()) expected.push_back(p.detach() * 3);
    TORCH_CHECK(distance(*run.model, expected) == 0, "what was loaded is lost");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a rank may keep more graphs than others", "[ranks][sharded]") {
  const auto reductions = run_ranks<int64_t>(2, [](const Rank& self) {
    NetRun run(self, over(self).prefetch(0));
    std::vector<at::Tensor> history;
    for (int64_t step = 0; step < 3; ++step) {
      auto loss = run.loss(step);
      if (self.rank == 0) history.push_back(loss);
      run.loss(step).backward();
    }
    return run.model->stats().units[0].reductions;
  });
  CHECK(reductions == std::vector<int64_t>{3, 3});
}

TEST_CASE("passes without reduction count for units that the next one leaves", "[ranks][sharded]") {
  struct Two : torch::nn::Module {
    explicit Two(const FullyShardedOptions& options) {
      for (const char* name : {"a", "b"}) {
        units.push_back(register_module(
            name, FullyShardedDataParallel<torch::nn::Linear>(torch::nn::Linear(2, 2), options)));
      }
    }
    at::Tensor forward(const at::Tensor& x, bool both) {
      const auto y = units[0]->forward(x);
      return both ? units[1]->forward(y) : y;
    }
    std::vector<FullyShardedDataParallel<torch::nn::Linear>> units;
  };
  const auto sums = run_ranks<double>(2, [](const Rank& self) {
    FullyShardedDataParallel model(std::make_shared<Two>(over(self)), over(self));
    {
      const auto guard = model->no_sync();
      model->forward(torch::ones({1, 2}), true).sum().backward();
    }
    model->forward(torch::ones({1, 2}), false).sum().backward();
    auto sum = torch::zeros({1});
    for (const auto& p : model->module()->units[1]->parameters()) sum += p.grad().abs().sum();
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, self.group);
    return sum.item<double>();
  });
  CHECK(sums[0] >= 2);  // the bias alone
}

TEST_CASE("a model frees its memory, and its graph keeps what it needs", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetUse use;
    use.options = over(self);
    at::Tensor loss, parameter;
    {
      NetRun run(self, use);
      loss = run.loss(0);
      parameter = run.model->module()->block1->module()->up->weight;
    }
    loss.backward();
    loss.reset();
    TORCH_CHECK(parameter.use_count() == 1, parameter.use_count(), " users of a parameter");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("zero_grad drops what passes without reduction left", "[ranks][sharded]") {
  const bool to_none = GENERATE(true, false);
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    const auto gradients = [&](bool with_dropped) {
      NetRun run(self, over(self));
      if (with_dropped) {
        const auto guard = run.model->no_sync();
        run.loss(7).backward();
      }
      net_optimizer(run.model->parameters()).zero_grad(to_none);
      run.loss(1).backward();
      return gradients_of(*run.model);
    };
    return largest_difference(gradients(true), gradients(false));
  });
  for (const auto largest : distances) CHECK(largest == 0);
}

TEST_CASE("gradients that no_sync left are not changed in place", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(0).backward();
    const auto pass = [&] {
      const auto guard = run.model->no_sync();
      run.loss(1).backward();
    };
    pass();
    pass();
    run.loss(2).backward();
    for (auto& p : run.model->parameters()) p.mutable_grad().mul_(0.5);  // all are summed
    pass();
    for (auto& p : run.model->parameters()) p.mutable_grad().mul_(0.5);
    pass();
  });
  // Each rank finds it on its own; one that is still gathering by then reads that the other has
  // left.
  size_t with_cause = 0;
  for (const auto& error : errors) {
    CHECK_FALSE(error.empty());
    if (error.find("expected .grad as a pass of no_sync() left it, or zeros") ==
        std::string::npos) {
      CHECK_THAT(error, ContainsText("left the process group"));
      continue;
    }
    ++with_cause;
    CHECK_THAT(error, ContainsText(" changed in place on rank"));
  }
  CHECK(with_cause > 0);
}

TEST_CASE("sync_in_backward reduces a pass of no_sync", "[ranks][sharded]") {
  const auto reductions = run_ranks<int64_t>(2, [&](const Rank& self) {
    NetRun run(self, over(self));
    std::vector<at::Tensor> losses;
    for (int64_t step = 0; step < 3; ++step) {
      const auto guard = run.model->no_sync();
      losses.push_back(run.loss(step));
    }
    for (size_t i = 0; i < losses.size(); ++i) {
      if (i == 2) run.model->sync_in_backward(losses[i] * 2);
      losses[i].backward();
    }
    return run.model->stats().units[1].reductions;
  });
  CHECK(reductions == std::vector<int64_t>{1, 1});
}

TEST_CASE("ignored parameters stay whole", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetUse use;
    use.options = over(self);
    FullyShardedDataParallel model(
        std::make_shared<ShardedNet>(use), over(self).ignored_parameters({"head.weight"}));
    const auto& weight = model->module()->head->weight;
    TORCH_CHECK(weight.sizes() == at::IntArrayRef({1, kIn}), weight.sizes());
    model->forward(net_input(use, 0, 0, self.rank), self.rank).backward();
    TORCH_CHECK(weight.grad().sizes() == weight.sizes());
    FullyShardedDataParallel bad(Block(), over(self).ignored_parameters({"head.weight"}));
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(errors[static_cast<size_t>(rank)], ContainsText("got head.weight on rank 0 of 2"));
  }
}

TEST_CASE("autograd::grad leaves gradients alone", "[ranks][sharded]") {
  const auto counts = run_ranks<int64_t>(2, [](const Rank& self) {
    NetRun run(self, over(self));
    const auto x = net_input(run.use, 0, 0, self.rank).requires_grad_();
    const auto found = torch::autograd::grad({run.model->forward(x, self.rank)}, {x});
    TORCH_CHECK(found[0].abs().sum().item<double>() > 0);
    for (const auto& p : run.model->parameters()) TORCH_CHECK(!p.grad().defined());
    run.loss().backward();
    return run.model->stats().units[0].reductions;
  });
  CHECK(counts == std::vector<int64_t>{1, 1});
}

TEST_CASE("equal_batches is the least or the most of the ranks", "[ranks]") {
  const auto counts = run_ranks<std::vector<int64_t>>(3, [](const Rank& self) {
    return std::vector<int64_t>{
        ddp::equal_batches(5 + self.rank, ddp::EqualBatches::Least, self.group),
        ddp::equal_batches(5 + self.rank, ddp::EqualBatches::Most, self.group)};
  });
  for (const auto& of_rank : counts) CHECK(of_rank == std::vector<int64_t>{5, 7});
}
