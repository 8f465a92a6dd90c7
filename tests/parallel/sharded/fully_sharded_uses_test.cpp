// Parameters of units that a program uses, or writes, in other places than their unit's forward.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "parallel/sharded/summoned.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;

namespace {

at::Tensor squares(const torch::nn::Module& module) {
  auto sum = torch::zeros({}, torch::kDouble);
  for (const auto& p : module.parameters()) sum = sum + p.pow(2).sum();
  return sum;
}

at::Tensor norms(const torch::nn::Module& module) {
  auto sum = torch::zeros({}, torch::kDouble);
  for (const auto& p : module.parameters()) sum = sum + p.norm();
  return sum;
}

using Penalty = at::Tensor (*)(const torch::nn::Module&);

/// A loss with a penalty that is computed before or after forward.
template <typename Model>
at::Tensor penalized(Model& model, const at::Tensor& x, int rank, Penalty penalty, bool is_before) {
  if (is_before) {
    const auto first = penalty(model);
    return model.forward(x, rank) + first;
  }
  const auto loss = model.forward(x, rank);
  return loss + penalty(model);
}

double distance_of_gradients(ddp::FullyShardedBase& model, const PlainNet& whole) {
  double largest = 0;
  const auto gradients = whole.named_parameters();
  for (const auto& layout : ddp::layouts_of(model)) {
    auto part = gradients[layout.name].grad();
    int64_t at = 0;
    for (const auto& box : layout.boxes) {
      auto of_box = part;
      for (size_t d = 0; d < box.size.size(); ++d) {
        of_box = of_box.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
      }
      const auto own = layout.local.grad().reshape({-1}).narrow(0, at, of_box.numel());
      largest = std::max(largest, (own - of_box.reshape({-1})).abs().max().item<double>());
      at += of_box.numel();
    }
  }
  return largest;
}

/// A root that computes with a parameter of a unit.
struct BorrowerImpl : torch::nn::Module {
  explicit BorrowerImpl(const ddp::FullyShardedOptions& options)
      : lender(register_module("lender", Unit(torch::nn::Linear(3, 4), options))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = lender->forward(x);
    return multiplies ? torch::linear(x, lender->module()->weight) + y
                      : lender->module()->weight.norm() * y;
  }
  using Unit = FullyShardedDataParallel<torch::nn::Linear>;
  Unit lender;
  bool multiplies = false;
};
TORCH_MODULE(Borrower);

}  // namespace

TEST_CASE("a penalty of shards is refused in backward", "[ranks][sharded][errors]") {
  const bool is_before = GENERATE(true, false);
  const int ranks = GENERATE(1, 2, 3);
  const bool keeps = GENERATE(true, false);
  const auto errors = run_ranks<std::string>(ranks, [&](const Rank& self) {
    NetUse use;
    use.options = over(self);
    if (keeps) use.options.reshard_after_forward(false);
    NetRun run(self, use);
    const auto x = net_input(use, 0, 0, self.rank);
    const auto text = error_of<c10::Error>(
        [&] { penalized(*run.model, x, self.rank, squares, is_before).backward(); });
    for (const auto& p : run.model->parameters()) {
      TORCH_CHECK(!p.grad().defined(), "a pass that failed left gradients");
    }
    run.loss().backward();  // and the model is usable
    return text;
  });
  CHECK_THAT(
      errors, Each(ContainsText("in forward of their unit, got a gradient of a value that was ")));
}

TEST_CASE("a penalty of summoned parameters trains as one process", "[ranks][sharded]") {
  const bool is_before = GENERATE(true, false);
  const auto penalty = GENERATE(&squares, &norms);
  PlainNet whole{NetUse()};
  for (int rank = 0; rank < 2; ++rank) {
    (penalized(whole, net_input(whole.use, 0, 0, rank), rank, penalty, is_before) / 2).backward();
  }
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    NetRun run(self, over(self));
    {
      const ddp::SummonFullParams summoned(*run.model);
      const auto x = net_input(run.use, 0, 0, self.rank);
      penalized(*run.model, x, self.rank, penalty, is_before).backward();
    }
    return distance_of_gradients(*run.model, whole);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("run is the forward of any function of a sharded model", "[ranks][sharded]") {
  const bool accumulates = GENERATE(false, true);
  // Reads a parameter of the root, which is whole inside of it.
  const auto loss_of = [](auto& net, const at::Tensor& x, int rank) {
    return net.forward(x, rank) + net.head->weight.pow(2).sum();
  };
  PlainNet whole{NetUse()};
  for (int rank = 0; rank < 2; ++rank) {
    (loss_of(whole, net_input(whole.use, 0, 0, rank), rank) / 2).backward();
  }
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    NetRun run(self, over(self));
    auto& net = *run.model->module();
    const auto x = net_input(run.use, 0, 0, self.rank);
    const auto pass = [&] { return run.model->run([&] { return loss_of(net, x, self.rank); }); };
    if (accumulates) {
      const auto guard = run.model->no_sync();
      (pass() / 2).backward();
    }
    (accumulates ? pass() / 2 : pass()).backward();
    return distance_of_gradients(*run.model, whole);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("a parameter that is used outside of its unit is refused", "[ranks][sharded][errors]") {
  const bool multiplies = GENERATE(true, false);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Borrower borrower(over(self));
    borrower->multiplies = multiplies;
    FullyShardedDataParallel model(borrower, over(self));
    model->forward(torch::ones({2, 3}));
  });
  CHECK_THAT(
      errors, Each(ContainsText(
                  multiplies ? "ran forward of the root on rank"
                             : "got weight in lender used outside of it in forward of the root")));
}

namespace {

/// Writes its table in forward as max_norm() does, and its scale itself.
struct WriterImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& rows) {
    {
      const torch::NoGradGuard no_grad;
      scale.clamp_(-0.25, 0.25);
    }
    return table->forward(rows) * scale;
  }
  torch::nn::Embedding table{register_module(
      "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).max_norm(0.5)))};
  at::Tensor scale = register_parameter("scale", torch::linspace(-1, 1, 3));
};
TORCH_MODULE(Writer);

Writer drawn_writer() {
  Writer writer;
  writer->to(torch::kDouble);
  draw_normal(*writer, 0.5, 7);
  return writer;
}

template <typename Model>
void train_writer(Model& model, torch::nn::Module& module, bool trains) {
  auto optimizer = net_optimizer(module.parameters());
  const auto rows = torch::tensor({0, 2, 5, 2});
  for (int step = 0; step < 3; ++step) {
    const torch::AutoGradMode mode(trains);
    const auto loss = model.forward(rows).pow(2).sum();
    if (!trains) continue;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}

}  // namespace

TEST_CASE("what forward writes to a parameter is kept", "[ranks][sharded]") {
  const bool trains = GENERATE(true, false);
  const bool reshards = GENERATE(true, false);
  const int ranks = GENERATE(1, 2, 3);
  auto whole = drawn_writer();
  const auto before = named_values(*whole);
  train_writer(*whole, *whole, trains);
  const auto expected = named_values(*whole);
  REQUIRE(largest_difference(before, expected) > 0.1);
  const auto distances = run_ranks<double>(ranks, [&](const Rank& self) {
    auto options = over(self);
    FullyShardedDataParallel unit(drawn_writer(), options.reshard_after_forward(reshards));
    train_writer(*unit, *unit, trains);
    return largest_difference(summoned_values(*unit), expected);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("forward that writes something else on each rank is an error", "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    FullyShardedDataParallel unit(drawn_writer(), over(self));
    unit->forward(torch::tensor({self.rank, 3})).pow(2).sum().backward();
  });
  CHECK_THAT(
      errors, Each(ContainsText(
                  "expected forward to write the same to parameters on all ranks, got other")));
}

namespace {

/// A block with a Sequential in it.
struct NestingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return net->forward(x) + x; }
  torch::nn::Sequential net{register_module(
      "net",
      torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4)))};
};
TORCH_MODULE(Nesting);

}  // namespace

TEST_CASE("fully_shard_children makes units of the parts alone", "[ranks][sharded]") {
  const auto names = run_ranks<std::string>(2, [](const Rank& self) {
    torch::nn::Sequential net(Nesting(), torch::nn::Tanh(), torch::nn::Linear(4, 2));
    const auto before = named_values(*net);
    TORCH_CHECK(ddp::fully_shard_children(net, over(self)) == 2);
    FullyShardedDataParallel model(net, over(self));
    model->forward(torch::ones({3, 4})).sum().backward();
    const auto values = summoned_values(*model);
    TORCH_CHECK(self.rank > 0 || largest_difference(values, before) == 0);
    std::string found;
    for (const auto& unit : model->stats().units) found += unit.name + ";";
    return found;
  });
  CHECK(names == std::vector<std::string>(2, ";0;2;"));
}

TEST_CASE("a sharded model may be destroyed in its own forward", "[ranks][sharded]") {
  struct Drops : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      drop();
      return fc->forward(x).sum();
    }
    std::function<void()> drop;
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(3, 3))};
  };
  const auto values = run_ranks<double>(2, [](const Rank& self) {
    const auto module = std::make_shared<Drops>();
    auto model =
        std::make_unique<FullyShardedDataParallel<std::shared_ptr<Drops>>>(module, over(self));
    module->drop = [&, weak = std::weak_ptr(model->ptr())] {
      model.reset();
      TORCH_CHECK(!weak.expired(), "destroyed while it runs");
    };
    const torch::NoGradGuard no_grad;
    const auto sum = model->get()->forward(torch::ones({2, 3}));
    return sum.item<double>();
  });
  CHECK(values[0] == values[1]);
}

TEST_CASE("a parameter that a unit has cut is not cut again", "[ranks][sharded][errors]") {
  const bool is_frozen = GENERATE(true, false);
  const bool is_gone = GENERATE(true, false);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    torch::nn::Linear first(4, 4);
    if (is_frozen) first->weight.requires_grad_(false);
    struct Tied : torch::nn::Module {
      explicit Tied(at::Tensor t) : weight(register_parameter("weight", t, t.requires_grad())) {}
      at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight); }
      at::Tensor weight;
    };
    const auto second = std::make_shared<Tied>(first->weight);
    {
      FullyShardedDataParallel unit(first, over(self));
      if (!is_gone) FullyShardedDataParallel other(second, over(self));
    }
    FullyShardedDataParallel other(second, over(self));
  });
  CHECK_THAT(
      errors, Each(ContainsText("each parameter in one unit, got \"weight\", which another")));
}
