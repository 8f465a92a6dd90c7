// What FullyShardedDataParallel refuses, and what it does when a rank fails.
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/gradient_notes.h"
#include "parallel/sharded/sharded_net.h"
#include "support/archives.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

using Layer = FullyShardedDataParallel<torch::nn::Linear>;
using Order = std::vector<size_t>;

/// Units of equal size, whose gathers and reductions fit to each other.
struct Units : torch::nn::Module {
  explicit Units(const FullyShardedOptions& options) {
    for (const char* name : {"one", "two", "three"}) {
      layers.push_back(register_module(name, Layer(torch::nn::Linear(4, 4), options)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto i : order) x = layers[i]->forward(x);
    return x;
  }
  Order order{0, 1, 2};
  std::vector<Layer> layers;
};

}  // namespace

TEST_CASE("an exception in forward leaves whole what is summoned", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    NetRun run(self, over(self));
    std::vector<at::Tensor> halves;
    {
      const ddp::SummonFullParams whole(*run.model, /*write_back=*/true);
      const torch::NoGradGuard no_grad;
      for (auto& p : run.model->parameters()) halves.push_back(p.mul_(0.5).clone());
      if (self.rank == 1) {
        const auto narrow = torch::ones({1, 1}, torch::kDouble);
        TORCH_CHECK(!error_of([&] { run.model->forward(narrow, self.rank); }).empty());
      }
      (void)run.loss(0);  // gathers nothing
    }
    TORCH_CHECK(distance(*run.model, halves) == 0, "what was written is lost");
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("units over other ranks than the root's are refused", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto alone = ddp::split_group(self.rank, 0, self.group);
    torch::nn::Sequential net;
    net->push_back(FullyShardedDataParallel(
        torch::nn::Linear(2, 2), FullyShardedOptions().process_group(alone)));
    FullyShardedDataParallel model(net, over(self));
  });
  CHECK_THAT(errors, Each(ContainsText("to be cut over the same ranks, got others in 0")));
}

TEST_CASE("a forward that changes its argument in place is refused", "[ranks][sharded][errors]") {
  struct Changes : torch::nn::Module {
    at::Tensor forward(at::Tensor x) { return fc->forward(x.relu_()); }
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(2, 2))};
  };
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    FullyShardedDataParallel unit(std::make_shared<Changes>(), over(self));
    const auto x = torch::ones({1, 2}).requires_grad_() * 2;
    unit->forward(x).sum().backward();
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("Change a clone()"));
}

TEST_CASE("a file of another model leaves a sharded one as it was", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    auto archive = reread(*torch::nn::Linear(3, 4));
    FullyShardedDataParallel unit(torch::nn::Linear(2, 2), over(self));
    const auto before = unit->module()->weight.clone();
    const auto text = error_of<c10::Error>([&] { unit->load(archive); });
    TORCH_CHECK(at::equal(unit->module()->weight, before));
    TORCH_CHECK(text.find("got one of [4, 3]") != std::string::npos, text);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a module in two units is refused", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Block block;
    auto tied = std::make_shared<torch::nn::Module>();
    FullyShardedDataParallel unit(block, over(self));
    torch::nn::Sequential net(torch::nn::Linear(1, 1));
    net->push_back(unit);
    net->push_back(block->up);
    FullyShardedDataParallel model(net, over(self));
  });
  CHECK_THAT(
      errors, Each(ContainsText("got \"2.weight\" in 1 and in the module around it on rank 0")));
}

TEST_CASE("ranks with other modules, and bad options, are refused", "[ranks][sharded][errors]") {
  const auto of = [](const std::function<void(const Rank&)>& body) {
    return error_of_all(2, body);
  };
  CHECK_THAT(
      of([](const Rank& self) {
        FullyShardedDataParallel unit(torch::nn::Linear(2, 3 + self.rank), over(self));
      }),
      ContainsText("got weight [3, 2] Float on rank 0 and weight [4, 2] Float on rank 1"));
  CHECK_THAT(
      of([](const Rank& self) {
        FullyShardedDataParallel unit(
            torch::nn::Linear(2, 3), over(self).prefetch(self.rank == 1 ? 5 : 1));
      }),
      ContainsText("expected prefetch 0 or 1, got 5 on rank 1 of 2"));
  CHECK_THAT(
      of([](const Rank& self) {
        FullyShardedDataParallel unit(torch::nn::Linear(nullptr), over(self));
      }),
      ContainsText("expected a module, got an empty one"));
}

TEST_CASE("calls that need whole parameters are refused", "[ranks][sharded][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    NetRun run(self, over(self));
    const auto call = [](const auto& body) { return error_of<c10::Error>(body); };
    torch::serialize::OutputArchive archive;
    const auto x = net_input(run.use, 0, 0, self.rank).requires_grad_();
    const std::vector<std::string> found{
        call([&] { run.model->save(archive); }),
        call([&] { run.model->clone(); }),
        call([&] { run.model->to(torch::kFloat); }),
        call([&] {
          torch::autograd::grad(
              {run.model->forward(x, self.rank)}, {x}, {}, /*retain_graph=*/true,
              /*create_graph=*/true);
        }),
    };
    run.loss().backward();  // still works
    return found;
  });
  for (const auto& of_rank : errors) {
    CHECK_THAT(of_rank[0], ContainsText("save() has this rank's shards alone"));
    CHECK_THAT(of_rank[1], ContainsText("clone() has this rank's shards alone"));
    CHECK_THAT(
        of_rank[2],
        ContainsText("Move each module, in device and dtype, before it becomes a unit"));
    CHECK_THAT(of_rank[3], ContainsText("expected a backward without create_graph"));
  }
}

TEST_CASE("an exception leaves shards and gradients as they were", "[ranks][sharded][errors]") {
  const bool in_backward = GENERATE(true, false);
  const auto distances = run_ranks<double>(2, [&](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(1).backward();
    const auto before = gradients_of(*run.model);
    const auto text = error_of<std::exception>([&] {
      if (in_backward) {
        auto x = net_input(run.use, 2, 0, self.rank).requires_grad_();
        auto y = x * 1;
        y.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("boom"); });
        run.model->forward(y, self.rank).backward();
      } else {
        run.model->forward(torch::ones({2, kIn + 1}, torch::kDouble), self.rank);
      }
    });
    TORCH_CHECK(!text.empty());
    for (const auto& p : run.model->parameters()) TORCH_CHECK(p.sizes() == p.grad().sizes());
    TORCH_CHECK(all_equal(gradients_of(*run.model), before));
    for (auto& p : run.model->parameters()) p.mutable_grad().reset();
    run.loss(1).backward();
    return largest_difference(gradients_of(*run.model), before);
  });
  for (const auto largest : distances) CHECK(largest < 1e-14);
}

TEST_CASE("a rank that throws ends the others", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(0).backward();
    if (self.rank == 1) throw std::runtime_error("boom");
    run.loss(1).backward();
  });
  CHECK_THAT(errors[0], ContainsText("rank 1"));
  CHECK_THAT(errors[0], ContainsText("FullyShardedDataParallel was "));
  CHECK_THAT(errors[0], !ContainsText("equal_batches"));  // the ranks did the same
}

TEST_CASE("ranks with unequal evaluation batches are found", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(0).backward();
    for (int64_t batch = 0; batch < 2 + self.rank; ++batch) {
      const torch::NoGradGuard no_grad;
      run.loss(batch);
    }
    run.loss(1).backward();
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("ddp::equal_batches()"));
  CHECK_THAT(errors[0], ContainsText("was beginning training on rank 0 of 2"));
  CHECK_THAT(errors[1], ContainsText("was gathering the root on rank 1 of 2"));
}

TEST_CASE("ranks that run other units are found", "[ranks][sharded][errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    const auto net = std::make_shared<Units>(over(self));
    net->order = {static_cast<size_t>(self.rank)};
    FullyShardedDataParallel model(net, over(self));
    model->forward(torch::ones({1, 4})).sum().backward();
  });
  CHECK_THAT(errors, Each(ContainsText("got one on rank 0 and two on rank 1 in forward 1")));
}

TEST_CASE("a rank that leaves a unit out of forward is found in it", "[ranks][sharded][errors]") {
  const auto at_step = GENERATE(0, 3);
  const auto left_out = GENERATE(1, 2);
  CAPTURE(at_step, left_out);
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    const auto net = std::make_shared<Units>(over(self));
    FullyShardedDataParallel model(net, over(self));
    for (int step = 0; step < 5; ++step) {
      if (step == at_step && self.rank == 1) net->order.erase(net->order.begin() + left_out);
      model->forward(torch::ones({1, 4})).sum().backward();
    }
  });
  CHECK_THAT(errors[0], ContainsText("FullyShardedDataParallel was gathering three on rank 0"));
  CHECK_THAT(errors[1], ContainsText("FullyShardedDataParallel was comparing the units"));
  CHECK_THAT(errors, Each(ContainsText("equal_batches()")));
}

namespace {

/// \param orders  of the units in the last of the steps, by rank.
/// \param root  whether one unit has the others.
std::vector<std::string> errors_of_orders(
    const std::vector<Order>& orders, at::ScalarType reduce_dtype, bool root) {
  return errors_of_ranks(static_cast<int>(orders.size()), kLongTimeout, [=](const Rank& self) {
    auto options = over(self);
    options.mp_policy(ddp::MixedPrecisionPolicy().reduce_dtype(reduce_dtype));
    const auto net = std::make_shared<Units>(options);
    std::optional<FullyShardedDataParallel<std::shared_ptr<Units>>> model;
    if (root) model.emplace(net, options);
    for (size_t step = 0; step <= orders.size(); ++step) {
      const bool is_last = step == orders.size();  // all ranks had each order before
      net->order = orders[is_last ? static_cast<size_t>(self.rank) : step];
      const auto x = torch::ones({1, 4});
      (root ? (*model)->forward(x) : net->forward(x)).sum().backward();
    }
  });
}

}  // namespace

TEST_CASE("gradients of different units in one sum are an error", "[ranks][sharded][errors]") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16, torch::kHalf);
  const bool root = GENERATE(true, false);
  const auto orders = GENERATE(
      std::vector<Order>{{0, 1, 2}, {0, 2, 1}},
      std::vector<Order>{{0, 1, 2}, {1, 2, 0}, {2, 0, 1}});  // each reduces another unit
  CAPTURE(dtype, root, orders);
  const std::string names[] = {"one", "two", "three"};
  const auto errors = errors_of_orders(orders, dtype, root);
  std::set<std::string> expected;  // by the rank that finds it first
  for (size_t rank = 0; rank < orders.size(); ++rank) {
    const auto name_of = [&](size_t of) { return root ? names[orders[of].back()] : "the root"; };
    for (size_t other = 0; other < orders.size(); ++other) {
      if (other == rank) continue;
      expected.insert(
          "got gradients of " + name_of(rank) + " on rank " + std::to_string(rank) + " of " +
          std::to_string(orders.size()) + " and of " + (root ? name_of(other) : "another model") +
          " on another");
    }
  }
  for (const auto& error : errors) {
    CAPTURE(error, expected);
    CHECK(std::any_of(expected.begin(), expected.end(), [&](const std::string& text) {
      return error.find(text) != std::string::npos;
    }));
  }
}

TEST_CASE("gradients that ranks clip each for itself are an error", "[ranks][sharded][errors]") {
  const auto sets_to_none = GENERATE(true, false);
  const auto errors = run_ranks<std::string>(3, [&](const Rank& self) {
    NetRun run(self, over(self));
    auto optimizer = net_optimizer(run.model->parameters());
    const auto step = [&](int64_t batch, bool clips_alone) {
      run.loss(batch).backward();
      if (clips_alone) {
        torch::nn::utils::clip_grad_norm_(run.model->parameters(), 0.1);
      } else {
        ddp::clip_grad_norm_(*run.model, 0.1);
      }
      optimizer.step();
      // Before it the next pass is over with set_to_none alone.
      if (sets_to_none || !clips_alone) optimizer.zero_grad(sets_to_none);
    };
    for (int64_t batch = 0; batch < 3; ++batch) step(batch, false);
    step(3, true);
    return error_of<c10::Error>([&] { step(4, false); });
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText("expected gradients to be scaled alike on all ranks, got those") &&
                  ContainsText("ddp::clip_grad_norm_(*model, max_norm)")));
  CHECK(errors[0] == errors[1]);
}

TEST_CASE("the spread of the ranks' numbers is read from maxima", "[pure][sharded]") {
  using Numbers = std::vector<std::optional<float>>;
  const auto spread_of = [](const Numbers& numbers) {
    auto maxima = torch::full({ddp::kSpreadWords}, -std::numeric_limits<float>::infinity());
    for (const auto& number : numbers) {
      const auto words = torch::empty({ddp::kSpreadWords});
      ddp::write_spread(number, words.data_ptr<float>());
      maxima = torch::maximum(maxima, words);
    }
    return ddp::read_spread(maxima.data_ptr<float>());
  };
  CHECK_FALSE(spread_of({std::nullopt, std::nullopt}).has_value());
  const auto check = [&](const Numbers& numbers, float least, float most) {
    const auto spread = spread_of(numbers);
    REQUIRE(spread.has_value());
    CHECK(spread->least == least);
    CHECK(spread->most == most);
  };
  check({7}, 7, 7);
  check({5, 5, 5}, 5, 5);
  check({0, 3}, 0, 3);
  check({std::nullopt, 0.5F, std::nullopt}, 0.5, 0.5);
  const float largest = 0xffffff;
  check({largest, largest - 1}, largest - 1, largest);
  CHECK(ddp::differ_in_factor({1, 0.95F}));
  CHECK_FALSE(ddp::differ_in_factor({1, 0.99F}));
}
