// A Checkpointer saves a sharded model and its optimizer; they load on other numbers of ranks, into
// a DistributedDataParallel or a plain model, and back.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/summoned.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

constexpr int64_t kSamples = 12;  // of a batch; 1, 2, 3 and 4 ranks divide it

enum class Stepper { Sgd, AdamW };
enum class Held { Plain, Replicated, Units, RootAlone };

/// What is trained, and how its ranks hold it.
struct Layout {
  int seed;  // of sizes
  Stepper stepper;
  Held held;
  int ranks;
};

/// Layers of random widths, a parameter without dimensions, a frozen one and a buffer.
///
/// \tparam L  torch::nn::Linear, or a unit of it.
template <typename L>
struct StackImpl : torch::nn::Module {
  StackImpl(int seed, uint64_t values, const FullyShardedOptions& options) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto below = [&](int64_t most) { return static_cast<int64_t>(random() % most); };
    width = 1 + below(6);
    int64_t from = width;
    const auto depth = 1 + below(4);
    for (int64_t i = 0; i < depth; ++i) {
      const auto to = 1 + below(9);
      torch::nn::Linear layer(torch::nn::LinearOptions(from, to).bias(below(4) > 0));
      layer->to(torch::kDouble);
      const torch::NoGradGuard no_grad;
      for (auto& p : layer->parameters()) p.copy_(draw_values(p.sizes().vec(), ++values));
      if (below(4) == 0) layer->weight.requires_grad_(false);
      if constexpr (std::is_same_v<L, torch::nn::Linear>) {
        layers.push_back(layer);
      } else {
        layers.emplace_back(layer, options);
      }
      register_module("layer" + std::to_string(i), layers.back());
      from = to;
    }
    scale = register_parameter("scale", draw_values({}, ++values));
    steps = register_buffer("steps", torch::zeros({2}, torch::kDouble));
  }

  at::Tensor forward(at::Tensor x) {
    steps.add_(1);
    for (auto& layer : layers) x = torch::tanh(layer->forward(x)) + 0.1;
    return (x * scale).pow(2).mean();
  }

  int64_t width = 0;
  std::vector<L> layers;
  at::Tensor scale, steps;
};

using PlainStack = StackImpl<torch::nn::Linear>;
using UnitStack = StackImpl<FullyShardedDataParallel<torch::nn::Linear>>;

/// One rank of a run.
class StackRun {
 public:
  StackRun(const Rank& self, const Layout& layout, uint64_t values = 1)
      : rank_(self.rank), ranks_(self.size) {
    const auto options = FullyShardedOptions().process_group(self.group);
    if (layout.held == Held::Units) {
      const auto inner = std::make_shared<UnitStack>(layout.seed, values, options);
      hold(std::make_shared<ddp::FullyShardedDataParallelImpl<std::shared_ptr<UnitStack>>>(
          inner, options));
      width_ = inner->width;
    } else {
      const auto inner = std::make_shared<PlainStack>(layout.seed, values, options);
      width_ = inner->width;
      if (layout.held == Held::RootAlone) {
        hold(std::make_shared<ddp::FullyShardedDataParallelImpl<std::shared_ptr<PlainStack>>>(
            inner, options));
      } else if (layout.held == Held::Replicated) {
        hold(std::make_shared<ddp::DistributedDataParallelImpl<std::shared_ptr<PlainStack>>>(
            inner, ddp::DistributedDataParallelOptions().process_group(self.group)));
      } else {
        hold(inner);
      }
    }
    const auto parameters = model_->parameters();
    if (layout.stepper == Stepper::Sgd) {
      optimizer_ = std::make_unique<torch::optim::SGD>(
          parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
    } else {
      optimizer_ = std::make_unique<torch::optim::AdamW>(
          parameters, torch::optim::AdamWOptions(0.01).amsgrad(true));
    }
  }

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      optimizer_->zero_grad();
      const auto batch = draw_values({kSamples, width_}, static_cast<uint64_t>(1000 + step));
      loss_(batch.chunk(ranks_)[static_cast<size_t>(rank_)]).backward();
      optimizer_->step();
    }
  }

  void add_to(ddp::Checkpointer& checkpointer) {
    checkpointer.add("optimizer", *optimizer_).add("model", *model_);
  }

  /// Whole ones.
  NamedValues values() const {
    if (auto* sharded = dynamic_cast<ddp::FullyShardedBase*>(model_.get())) {
      return summoned_values(*sharded);
    }
    const bool is_wrapped =
        dynamic_cast<ddp::DistributedDataParallelBase*>(model_.get()) != nullptr;
    return named_values(is_wrapped ? *model_->children().front() : *model_);
  }

 private:
  template <typename Model>
  void hold(const std::shared_ptr<Model>& model) {
    model_ = model;
    loss_ = [model](const at::Tensor& x) { return model->forward(x); };
  }

  const int rank_, ranks_;
  int64_t width_ = 0;
  std::shared_ptr<torch::nn::Module> model_;
  std::function<at::Tensor(const at::Tensor&)> loss_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

ddp::CheckpointerOptions saved_by(const Rank& self) {
  return ddp::CheckpointerOptions().process_group(self.group);
}

/// Goes on from step `from`, if it is above 0, and saves the next one.
///
/// \return the values after loading and after the step.
std::pair<NamedValues, NamedValues> go_on(
    const std::string& folder, const Layout& layout, int64_t from) {
  using Pair = std::pair<NamedValues, NamedValues>;
  return run_ranks<Pair>(layout.ranks, [&](const Rank& self) {
    StackRun run(self, layout, from == 0 ? 1 : 100 + static_cast<uint64_t>(from));
    ddp::Checkpointer checkpointer(folder, saved_by(self));
    run.add_to(checkpointer);
    if (from > 0) {
      run.train(20, 21);  // a state to be replaced
      TORCH_CHECK(checkpointer.load_latest() == from, "another step");
    }
    Pair result;
    result.first = run.values();
    run.train(from, from + 1);
    checkpointer.save(from + 1);
    checkpointer.wait();
    result.second = run.values();
    return result;
  })[static_cast<size_t>(layout.ranks - 1)];
}

NamedValues without_stop(const Layout& layout, int64_t steps) {
  return run_ranks<NamedValues>(layout.ranks, [&](const Rank& self) {
    StackRun run(self, layout);
    run.train(0, steps);
    return run.values();
  })[0];
}

std::string text_of_layouts(const std::vector<Layout>& layouts) {
  std::string text;
  for (const auto& layout : layouts) {
    text += c10::str(" ", static_cast<int>(layout.held), " on ", layout.ranks);
  }
  return text;
}

}  // namespace

TEST_CASE("a sharded model loads on other ranks, whole, and back", "[ranks][sharded][checkpoint]") {
  constexpr int64_t kHops = 5;
  for (const auto seed : seeds(12)) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto stepper = random() % 2 == 0 ? Stepper::Sgd : Stepper::AdamW;
    std::vector<Layout> layouts;
    for (int64_t hop = 0; hop < kHops; ++hop) {
      const auto held = static_cast<Held>(random() % 4);
      const int ranks = held == Held::Plain ? 1 : 1 + static_cast<int>(random() % 4);
      layouts.push_back({seed, stepper, held, ranks});
    }
    CAPTURE(seed, static_cast<int>(stepper), text_of_layouts(layouts));
    const TemporaryFolder folder;
    NamedValues saved;
    for (int64_t hop = 0; hop < kHops; ++hop) {
      CAPTURE(hop);
      auto [loaded, after] = go_on(folder.path(), layouts[static_cast<size_t>(hop)], hop);
      if (hop > 0) CHECK(largest_difference(loaded, saved) == 0);
      saved = std::move(after);
    }
    const auto expected = without_stop({seed, stepper, Held::Plain, 1}, kHops);
    CHECK(largest_difference(saved, expected) < 1e-12);
  }
}

TEST_CASE("a sharded model goes on to the bit", "[ranks][sharded][checkpoint]") {
  const auto stepper = GENERATE(Stepper::Sgd, Stepper::AdamW);
  // Sums of two numbers do not depend on the order of the ranks.
  const auto before = GENERATE(Held::Units, Held::RootAlone, Held::Replicated);
  const auto after = GENERATE(Held::Units, Held::RootAlone, Held::Replicated);
  const int seed = 7;
  const TemporaryFolder folder;
  go_on(folder.path(), {seed, stepper, before, 2}, 0);
  go_on(folder.path(), {seed, stepper, before, 2}, 1);
  const auto resumed = go_on(folder.path(), {seed, stepper, after, 2}, 2).second;
  CAPTURE(static_cast<int>(stepper), static_cast<int>(before), static_cast<int>(after));
  const auto expected = without_stop({seed, stepper, before, 2}, 3);
  CHECK(largest_difference(resumed, expected) == 0);
}

TEST_CASE("each rank saves its own shards, once", "[ranks][sharded][checkpoint]") {
  const TemporaryFolder folder;
  go_on(folder.path(), {7, Stepper::AdamW, Held::Units, 3}, 0);
  auto names = names_in(folder.file("step-00000001"));
  std::sort(names.begin(), names.end());
  CHECK(
      names == std::vector<std::string>{
                   "manifest.json", "model.shard-00000.pt", "model.shard-00001.pt",
                   "model.shard-00002.pt", "optimizer.pt", "optimizer.shard-00000.pt",
                   "optimizer.shard-00001.pt", "optimizer.shard-00002.pt", "rank-0.pt", "rank-1.pt",
                   "rank-2.pt"});
}

TEST_CASE("an LBFGS of shards is not saved", "[ranks][sharded][checkpoint][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    FullyShardedDataParallel model(
        torch::nn::Linear(3, 4), FullyShardedOptions().process_group(self.group));
    torch::optim::LBFGS optimizer(model->parameters());
    ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
    checkpointer.add("model", model).add("optimizer", optimizer);
    checkpointer.save(1);
  });
  CHECK_THAT(errors, Each(ContainsText("expected one of LibTorch's Adam, AdamW, SGD, RMSprop")));
}

TEST_CASE(
    "a whole checkpoint of another model is refused", "[ranks][sharded][checkpoint][errors]") {
  const bool is_sharded_first = GENERATE(true, false);
  const TemporaryFolder folder;
  const auto sharded = Layout{1, Stepper::Sgd, Held::Units, 2};
  const auto whole = Layout{2, Stepper::Sgd, Held::Replicated, 2};
  go_on(folder.path(), is_sharded_first ? sharded : whole, 0);
  const auto& other = is_sharded_first ? whole : sharded;
  const auto error = error_of_all(2, [&](const Rank& self) {
    StackRun run(self, other);
    ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
    run.add_to(checkpointer);
    checkpointer.load(1);
  });
  CHECK_THAT(error, ContainsText("it was saved"));
}

TEST_CASE(
    "an optimizer's state goes to the parameters of its names", "[ranks][sharded][checkpoint]") {
  const TemporaryFolder folder;
  const auto run = [&](const Rank& self, bool is_sharded, bool is_reversed) {
    // Two parameters of each shape.
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    net->to(torch::kDouble);
    {
      const torch::NoGradGuard no_grad;
      uint64_t seed = 0;
      for (auto& parameter : net->parameters())
        parameter.copy_(draw_values(parameter.sizes().vec(), ++seed));
    }
    std::shared_ptr<torch::nn::Module> model = net.ptr();
    std::function<at::Tensor(const at::Tensor&)> forward = [&](const at::Tensor& x) {
      return net->forward(x);
    };
    if (is_sharded) {
      FullyShardedDataParallel sharded(net, FullyShardedOptions().process_group(self.group));
      model = sharded.ptr();
      forward = [sharded](const at::Tensor& x) mutable { return sharded->forward(x); };
    }
    auto parameters = model->parameters();
    if (is_reversed) std::reverse(parameters.begin(), parameters.end());
    torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
    const auto train = [&] {
      optimizer.zero_grad();
      forward(draw_values({3, 4}, 50)).pow(2).sum().backward();
      optimizer.step();
    };
    ddp::Checkpointer checkpointer(folder.path(), saved_by(self));
    checkpointer.add("model", *model).add("optimizer", optimizer);
    train();
    is_reversed ? checkpointer.load(1) : checkpointer.save(1);
    train();
    if (auto* sharded = dynamic_cast<ddp::FullyShardedBase*>(model.get()))
      return summoned_values(*sharded);
    return named_values(*model);
  };
  const auto values = [&](bool is_sharded, bool is_reversed) {
    return run_ranks<NamedValues>(
        2, [&](const Rank& self) { return run(self, is_sharded, is_reversed); })[1];
  };
  const auto expected = values(true, false);
  CHECK(largest_difference(values(true, true), expected) < 1e-14);
  CHECK(largest_difference(values(false, true), expected) < 1e-14);
}
