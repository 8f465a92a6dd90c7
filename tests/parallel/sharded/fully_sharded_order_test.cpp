// The order of a sharded model's collectives, beside those of the program and where ranks leave
// units out.
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "parallel/sharded/summoned.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

/// Between its parts the program adds up gradients over the ranks. The middle can be left out.
///
/// \tparam B  Block, or a unit of it.
template <typename B>
struct SummingNet : torch::nn::Module {
  explicit SummingNet(const FullyShardedOptions& options) {
    for (uint64_t i = 0; i < 4; ++i) {
      Block block;
      block->to(torch::kDouble);
      draw_normal(*block, 0.5, 20 + i);
      if constexpr (std::is_same_v<B, Block>) {
        blocks.push_back(block);
      } else {
        blocks.push_back(B(block, options));
      }
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  at::Tensor first(const at::Tensor& x) { return blocks[0]->forward(x); }
  at::Tensor rest(const at::Tensor& x, bool leaves_out) {
    const auto y = blocks[2]->forward(blocks[1]->forward(torch::sin(x)));
    return blocks[3]->forward(leaves_out ? x * 1 : y).pow(2).mean();
  }
  std::vector<B> blocks;
};

struct SummingUnits : SummingNet<FullyShardedDataParallel<Block>> {
  SummingUnits(const Rank& self, const FullyShardedOptions& options)
      : SummingNet(options), group(self.group), leaves_out(self.rank == 1) {}
  at::Tensor forward(const at::Tensor& x) {
    return rest(ddp::functional::copy_to_region(first(x), group), leaves_out);
  }
  ddp::ProcessGroup group;
  bool leaves_out;
};

/// Two units; the result of the first can be left out.
struct Tower : torch::nn::Module {
  explicit Tower(const FullyShardedOptions& options)
      : first(register_module("first", unit(options))),
        second(register_module("second", unit(options))) {}
  static FullyShardedDataParallel<Block> unit(const FullyShardedOptions& options) {
    return FullyShardedDataParallel<Block>(Block(), options);
  }
  at::Tensor forward(const at::Tensor& x, bool leaves_out) {
    const auto y = first->forward(x);
    return second->forward(leaves_out ? x : y).pow(2).mean();
  }
  FullyShardedDataParallel<Block> first, second;
};

NamedValues train_summing_net(int ranks) {
  SummingNet<Block> net({});
  auto optimizer = net_optimizer(net.parameters());
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    std::vector<at::Tensor> firsts;
    auto sum = torch::zeros({3, kIn}, torch::kDouble);
    for (int rank = 0; rank < ranks; ++rank) {
      firsts.push_back(net.first(net_input({}, step, 0, rank)));
      const auto leaf = firsts.back().detach().requires_grad_();
      (net.rest(leaf, rank == 1) / ranks).backward();
      sum += leaf.grad();
    }
    for (const auto& first : firsts) first.backward(sum);
    optimizer.step();
  }
  return named_values(net);
}

}  // namespace

TEST_CASE("the program's collectives keep their place beside units left out", "[ranks][sharded]") {
  const auto prefetch = GENERATE(0, 1);
  const int ranks = GENERATE(2, 3);
  const auto expected = train_summing_net(ranks);
  const auto distances = run_ranks<double>(ranks, [&](const Rank& self) {
    const auto options = FullyShardedOptions().process_group(self.group).prefetch(prefetch);
    FullyShardedDataParallel model(std::make_shared<SummingUnits>(self, options), options);
    auto optimizer = net_optimizer(model->parameters());
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model->forward(net_input({}, step, 0, self.rank)).backward();
      optimizer.step();
    }
    return largest_difference(summoned_values(*model), expected);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE("each checkpoint of a unit has its place", "[ranks][sharded]") {
  const auto prefetch = GENERATE(0, 1);
  const int ranks = GENERATE(2, 3);
  // Rank 1 leaves out what is between the checkpoints.
  const auto loss = [](auto& net, const at::Tensor& x, int rank) {
    auto& blocks = net.blocks;
    const auto first = torch::sin(ddp::checkpoint(blocks[1], blocks[0]->forward(x)));
    const auto between = blocks[2]->forward(first);
    const auto second = ddp::checkpoint(blocks[1], rank == 1 ? first * 2 : between);
    return blocks[3]->forward(second).pow(2).mean();
  };
  struct Net : SummingNet<FullyShardedDataParallel<Block>> {
    using Loss = std::function<at::Tensor(Net&, const at::Tensor&)>;
    Net(const FullyShardedOptions& options, Loss given)
        : SummingNet(options), loss(std::move(given)) {}
    at::Tensor forward(const at::Tensor& x) { return loss(*this, x); }
    Loss loss;
  };
  SummingNet<Block> plain({});
  for (int rank = 0; rank < ranks; ++rank) {
    (loss(plain, net_input({}, 0, 0, rank), rank) / ranks).backward();
  }
  net_optimizer(plain.parameters()).step();
  const auto expected = named_values(plain);
  const auto distances = run_ranks<double>(ranks, [&](const Rank& self) {
    const auto options = FullyShardedOptions().process_group(self.group).prefetch(prefetch);
    const auto of_rank = [&](Net& net, const at::Tensor& x) { return loss(net, x, self.rank); };
    FullyShardedDataParallel model(std::make_shared<Net>(options, of_rank), options);
    model->forward(net_input({}, 0, 0, self.rank)).backward();
    net_optimizer(model->parameters()).step();
    return largest_difference(summoned_values(*model), expected);
  });
  for (const auto distance : distances) CHECK(distance < 1e-12);
}

TEST_CASE(
    "two models in one backward have their order where a rank leaves a unit out",
    "[ranks][sharded]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto options = FullyShardedOptions().process_group(self.group);
    FullyShardedDataParallel image(std::make_shared<Tower>(options), options);
    FullyShardedDataParallel text(std::make_shared<Tower>(options), options);
    const auto x = torch::ones({3, kIn});
    for (int step = 0; step < 2; ++step) {
      const auto of_image = image->forward(x, false);
      (of_image + text->forward(x, self.rank == 1)).backward();
    }
    for (const auto* model : {&image, &text}) {
      for (const auto& unit : (*model)->stats().units) {
        TORCH_CHECK(unit.name.empty() || unit.reductions == 2, unit.name, unit.reductions);
      }
    }
  });
  CHECK(errors == std::vector<std::string>(2));
}
