// A small network of three units and a root, and the same without units, for tests that compare the
// two.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include <ddp/activation_checkpoint.h>
#include <ddp/fully_sharded.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

namespace ddp::testing {

/// How the network is used in a test.
struct NetUse {
  /// Of block 2: of a part of it, of its call, of each of two calls, or of two calls and one of
  /// block 1 between them.
  enum class Checkpoint { None, Inside, Around, Each, Together };

  FullyShardedOptions options = {};
  at::ScalarType dtype = torch::kDouble;
  int64_t steps = 3;
  int64_t micro_batches = 1;
  bool reduces_each = true;  // micro-batch; else the last
  bool input_needs_gradient = false;
  bool frozen_middle = false;  // block 2
  bool twice = false;          // block 1
  bool in_place = false;       // first operation on block 1's output
  bool retains = false;        // two backward passes through one graph
  bool evaluates_between = false;
  Checkpoint checkpoint = Checkpoint::None;
  std::optional<int> leaves_out_on = {};  // the rank whose loss lacks block 2; -1: all
  bool has_unused = false;                // a parameter of block 3 that nobody uses
  bool sums_two_passes = false;           // one backward through two forwards
  bool saves_on_host = false;             // what autograd saves goes through save_on_host
};

/// Widths that no number of ranks divides.
constexpr int64_t kIn = 5, kInner = 7;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : up(register_module("up", torch::nn::Linear(kIn, kInner))),
        down(register_module("down", torch::nn::Linear(kInner, kIn))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto inner = [this](const at::Tensor& t) { return torch::tanh(up->forward(t)); };
    if (!checkpoints) return down->forward(inner(x)) + x;
    const auto options = CheckpointOptions().parameters(up->parameters());
    return down->forward(checkpoint(options, inner, x)) + x;
  }
  torch::nn::Linear up, down;
  bool checkpoints = false;
};
TORCH_MODULE(Block);

/// \tparam B  Block, or a unit of it.
template <typename B>
struct NetImpl : torch::nn::Module {
  static constexpr bool is_sharded = !std::is_same_v<B, Block>;

  explicit NetImpl(const NetUse& net_use) : use(net_use) {
    stem = register_module("stem", torch::nn::Linear(kIn, kIn));
    block1 = register_module("block1", make_block(1));
    block2 = register_module("block2", make_block(2));
    block3 = register_module("block3", make_block(3));
    head = register_module("head", torch::nn::Linear(kIn, 1));
    stem->to(use.dtype);
    head->to(use.dtype);
    draw_normal(*stem, 0.5, 4);
    draw_normal(*head, 0.5, 5);
  }

  B make_block(uint64_t seed) const {
    Block block;
    block->to(use.dtype);
    if (seed == 3 && use.has_unused) {
      block->register_parameter("unused", torch::ones({3, 2}, use.dtype));
    }
    draw_normal(*block, 0.5, seed);
    block->checkpoints = seed == 2 && use.checkpoint == NetUse::Checkpoint::Inside;
    if (seed == 2 && use.frozen_middle) {
      for (auto& p : block->up->parameters()) p.requires_grad_(false);
    }
    if constexpr (is_sharded) {
      return B(block, use.options);
    } else {
      return block;
    }
  }

  at::Tensor forward(at::Tensor x, int rank) {
    x = stem->forward(x);
    x = block1->forward(x);
    if (use.in_place) {
      x.relu_();
    } else {
      x = torch::sin(x);
    }
    if (use.twice) x = block1->forward(x);
    const auto y = middle(x);
    const bool leaves_out =
        use.leaves_out_on && (*use.leaves_out_on == rank || *use.leaves_out_on < 0);
    x = block3->forward(leaves_out ? x : y);
    return head->forward(x).pow(2).mean();
  }

  at::Tensor middle(const at::Tensor& x) {
    switch (use.checkpoint) {
      case NetUse::Checkpoint::Around:
        return checkpoint(block2, x);
      case NetUse::Checkpoint::Each: {
        const auto y = torch::sin(checkpoint(block2, x));
        // What a rank may leave out, and whose gather comes between those of the two.
        return checkpoint(block2, block1->forward(y));
      }
      case NetUse::Checkpoint::Together: {
        auto parameters = block1->parameters();
        for (const auto& p : block2->parameters()) parameters.push_back(p);
        const auto both = [this](const at::Tensor& t) {
          return block2->forward(torch::sin(block1->forward(block2->forward(t))));
        };
        return checkpoint(CheckpointOptions().parameters(parameters), both, x);
      }
      default:
        return block2->forward(x);
    }
  }

  NetUse use;
  torch::nn::Linear stem{nullptr}, head{nullptr};
  B block1{nullptr}, block2{nullptr}, block3{nullptr};
};

using PlainNet = NetImpl<Block>;
using ShardedNet = NetImpl<FullyShardedDataParallel<Block>>;

/// The input of a rank.
inline at::Tensor net_input(const NetUse& use, int64_t step, int64_t micro, int rank) {
  const auto seed = static_cast<uint64_t>((step * 10 + micro) * 10 + rank + 1);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  auto x = torch::randn({3, kIn}, generator, torch::dtype(use.dtype));
  return x.requires_grad_(use.input_needs_gradient);
}

inline torch::optim::SGD net_optimizer(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(
      parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

inline FullyShardedOptions over(const Rank& self) {
  return FullyShardedOptions().process_group(self.group);
}

/// The largest difference between whole parameters and others.
inline double distance(FullyShardedBase& model, const std::vector<at::Tensor>& others) {
  const SummonFullParams whole(model);
  return largest_difference(model.parameters(), others);
}

/// A sharded model in which each rank trains on inputs of its own.
struct NetRun {
  NetRun(const Rank& self, const NetUse& net_use)
      : use(net_use), rank(self.rank), model(std::make_shared<ShardedNet>(use), use.options) {}
  /// Used as it is by default.
  NetRun(const Rank& self, const FullyShardedOptions& options) : NetRun(self, NetUse{options}) {}

  at::Tensor loss(int64_t step = 0) { return model->forward(net_input(use, step, 0, rank), rank); }

  NetUse use;
  int rank;
  FullyShardedDataParallel<std::shared_ptr<ShardedNet>> model;
};

}  // namespace ddp::testing
