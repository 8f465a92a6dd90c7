// Joins of several models that share losses: random programs with uneven inputs, compared with one
// process that replays them.
#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::join_models {
namespace {

using namespace testing;

constexpr double kLearningRate = 0.1;

// Three weights, of which some forward passes skip the last, and a buffer that all passes change.
class NetImpl : public torch::nn::Module {
 public:
  NetImpl() {
    for (const char* name : {"a", "b", "c"}) {
      register_parameter(name, torch::full({3}, 0.5, at::kDouble));
    }
    passes = register_buffer("passes", torch::zeros({1}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x, bool skip) {
    passes.add_(x.detach().sum());
    const auto weights = parameters();
    auto y = torch::tanh(x * weights[0]) * weights[1];
    return skip ? y : y + weights[2] * x;
  }
  at::Tensor passes;
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<Net>;
using ShardedSgd = ZeroRedundancyOptimizer<torch::optim::SGD>;

// A forward pass of one model, on a batch or on the output of an earlier pass of the same loss.
struct Call {
  size_t model;
  int input;  // index of an earlier call; -1: a batch
  bool in_loss;
};

// Forward passes and one backward pass. After it, the models that it averages are stepped.
struct Loss {
  std::vector<Call> calls;
  std::set<size_t> frozen, local;  // models; local ones are under no_sync()

  // The models whose parameters get gradients in the backward pass.
  std::set<size_t> reached() const {
    std::set<size_t> models;
    for (size_t c = 0; c < calls.size(); ++c) {
      if (goes_through(c) && !frozen.count(calls[c].model)) models.insert(calls[c].model);
    }
    return models;
  }
  // Whether the loss depends on call `c`.
  bool goes_through(size_t c) const {
    if (calls[c].in_loss) return true;
    for (size_t later = c + 1; later < calls.size(); ++later) {
      if (calls[later].input == static_cast<int>(c) && goes_through(later)) return true;
    }
    return false;
  }
};

struct Config {
  Reduction reduction;
  bool find_unused;
  int zero_stage;  // 0: plain SGD
  double cap_mb;
};

// The random program of one seed; the same on every rank.
struct Program {
  std::vector<Config> models;
  std::vector<int> inputs;                // iterations by rank
  std::vector<std::vector<Loss>> losses;  // by iteration
  std::vector<size_t> order;              // of the models in the join
  bool initial_divisor;
  bool early;  // throw_on_early_termination, with even inputs
};

class Draw {
 public:
  explicit Draw(int seed) : random_(seed) {}
  int below(int bound) { return static_cast<int>(random_() % bound); }
  bool one_in(int n) { return below(n) == 0; }

 private:
  std::mt19937 random_;
};

Loss draw_loss(Draw& draw, size_t models) {
  Loss loss;
  const int calls = 1 + draw.below(4);
  for (int c = 0; c < calls; ++c) {
    const auto model = static_cast<size_t>(draw.below(static_cast<int>(models)));
    const int input = c > 0 && draw.one_in(2) ? draw.below(c) : -1;
    loss.calls.push_back({model, input, c + 1 == calls || draw.one_in(2)});
  }
  for (size_t model = 0; model < models; ++model) {
    if (draw.one_in(6)) loss.frozen.insert(model);
    if (draw.one_in(4)) loss.local.insert(model);
  }
  return loss;
}

Program draw_program(int seed, int world) {
  Draw draw(seed);
  Program p;
  p.early = draw.one_in(5);
  const int models = 2 + draw.below(2);
  for (int m = 0; m < models; ++m) {
    const Reduction reductions[] = {Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted};
    Config config{};
    // With early termination samples count in forward, before a backward pass is certain; so no
    // SampleWeighted.
    config.reduction = reductions[draw.one_in(2) ? 0 : draw.below(p.early ? 2 : 3)];
    config.find_unused = draw.one_in(3);
    config.zero_stage = draw.one_in(3) ? (config.find_unused ? 2 : 1 + draw.below(2)) : 0;
    config.cap_mb = draw.one_in(2) ? 1e-6 : 25.0;
    p.models.push_back(config);
    p.order.push_back(static_cast<size_t>(m));
  }
  std::rotate(p.order.begin(), p.order.begin() + draw.below(models), p.order.end());
  for (int rank = 0; rank < world; ++rank) {
    p.inputs.push_back(p.early && rank > 0 ? p.inputs[0] : draw.below(6));
  }
  for (int i = 0; i < 5; ++i) {
    auto& losses = p.losses.emplace_back();
    const int count = 1 + draw.below(3);
    for (int l = 0; l < count; ++l) losses.push_back(draw_loss(draw, p.models.size()));
  }
  p.initial_divisor = draw.one_in(2);
  return p;
}

// Identifies one forward pass of a rank.
struct CallSite {
  int rank, iteration;
  size_t loss, call;
};

at::Tensor batch_of(const CallSite& at) {
  const int seed = at.rank * 1000 + at.iteration * 100 + static_cast<int>(at.loss * 10 + at.call);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::rand({1 + (at.rank + at.iteration) % 3, 3}, generator, at::kDouble);
}

bool skips(const Config& config, const CallSite& at) {
  return config.find_unused && (at.rank + at.iteration + static_cast<int>(at.call)) % 3 == 0;
}

// The value of `loss`; `forward` calls a model.
at::Tensor value_of(
    const Loss& loss, CallSite at,
    const std::function<at::Tensor(size_t model, const at::Tensor&, const CallSite&)>& forward) {
  std::vector<at::Tensor> outputs;
  auto sum = torch::zeros({}, at::kDouble);
  for (at.call = 0; at.call < loss.calls.size(); ++at.call) {
    const auto& call = loss.calls[at.call];
    outputs.push_back(forward(
        call.model, call.input < 0 ? batch_of(at) : outputs[static_cast<size_t>(call.input)], at));
    if (call.in_loss) sum = sum + outputs.back().pow(2).sum(1).mean();
  }
  return sum;
}

// Each model's weights and its buffer at the end.
using States = std::vector<at::Tensor>;

States train(const Program& p, const Rank& self) {
  std::vector<Model> models;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  std::vector<ShardedSgd*> sharded(p.models.size(), nullptr);
  for (size_t m = 0; m < p.models.size(); ++m) {
    const auto& config = p.models[m];
    models.emplace_back(
        Net(), in(self)
                   .reduction(config.reduction)
                   .find_unused_parameters(config.find_unused)
                   .bucket_cap_mb(config.cap_mb));
    const auto options = torch::optim::SGDOptions(kLearningRate);
    if (config.zero_stage > 0) {
      auto optimizer =
          std::make_unique<ShardedSgd>(models[m], options, ZeroOptions().stage(config.zero_stage));
      sharded[m] = optimizer.get();
      optimizers.push_back(std::move(optimizer));
    } else {
      optimizers.push_back(
          std::make_unique<torch::optim::SGD>(models[m]->module()->parameters(), options));
    }
  }
  const auto run = [&](const Loss& loss, const CallSite& at) {
    std::vector<std::unique_ptr<NoSyncGuard>> guards;
    for (const size_t m : loss.local) guards.emplace_back(new NoSyncGuard(models[m]->no_sync()));
    for (size_t m = 0; m < models.size(); ++m) {
      for (auto& w : models[m]->parameters()) w.set_requires_grad(loss.frozen.count(m) == 0);
    }
    const auto value =
        value_of(loss, at, [&](size_t m, const at::Tensor& x, const CallSite& place) {
          return models[m]->forward(x, skips(p.models[m], place));
        });
    const auto reached = loss.reached();
    if (!reached.empty()) value.backward();
    for (const size_t m : reached) {
      if (loss.local.count(m)) continue;
      optimizers[m]->step();
      sharded[m] ? sharded[m]->zero_grad() : optimizers[m]->zero_grad();
    }
  };
  std::vector<Joinable*> joinables;
  for (const size_t m : p.order) {
    if (sharded[m]) joinables.push_back(sharded[m]);
    joinables.push_back(models[m].get());
  }
  const auto body = [&] {
    for (int i = 0; i < p.inputs[self.rank]; ++i) {
      for (size_t l = 0; l < p.losses[i].size(); ++l) run(p.losses[i][l], {self.rank, i, l, 0});
    }
  };
  join(
      joinables, body,
      JoinOptions()
          .divide_by_initial_world_size(p.initial_divisor)
          .throw_on_early_termination(p.early));
  States states;
  for (auto& model : models) {
    for (const auto& w : model->module()->parameters()) states.push_back(w.detach().clone());
    states.push_back(model->module()->passes.clone());
  }
  return states;
}

// Computes in one process what all ranks compute. Ranks with input have equal parameters all the
// time, so one copy is enough; each rank has its own gradients, buffers and samples.
class SingleProcess {
 public:
  explicit SingleProcess(const Program& p) : p_(p), world_(static_cast<int>(p.inputs.size())) {
    const auto none = at::Tensor();
    for (size_t m = 0; m < p.models.size(); ++m) {
      nets_.emplace_back(Net());
      pending_.emplace_back(world_, std::vector<at::Tensor>(3, none));
      buffers_.emplace_back(world_, torch::zeros({1}, at::kDouble));
      samples_.emplace_back(world_, 0.0);
    }
    rounds_.assign(world_, 0);
  }

  States replay() {
    for (int i = 0; i < static_cast<int>(p_.losses.size()); ++i) {
      std::vector<int> active;
      for (int rank = 0; rank < world_; ++rank) {
        if (p_.inputs[rank] > i) active.push_back(rank);
      }
      if (active.empty()) break;
      for (size_t l = 0; l < p_.losses[i].size(); ++l) run(p_.losses[i][l], i, l, active);
    }
    const int most = *std::max_element(rounds_.begin(), rounds_.end());
    int last = 0;
    for (int rank = 0; rank < world_; ++rank) {
      if (rounds_[rank] == most) last = rank;
    }
    States states;
    for (size_t m = 0; m < nets_.size(); ++m) {
      for (const auto& w : nets_[m]->parameters()) states.push_back(w.detach().clone());
      states.push_back(buffers_[m][last]);
    }
    return states;
  }

 private:
  void run(const Loss& loss, int iteration, size_t l, const std::vector<int>& active) {
    const auto reached = loss.reached();
    for (const int rank : active) accumulate(loss, {rank, iteration, l, 0}, reached);
    for (const size_t m : reached) {
      if (loss.local.count(m)) continue;
      for (const int rank : active) rounds_[rank] += 1 + (p_.models[m].zero_stage > 0 ? 1 : 0);
      average_and_step(m, active);
    }
  }

  void accumulate(const Loss& loss, const CallSite& at, const std::set<size_t>& reached) {
    const auto value =
        value_of(loss, at, [&](size_t m, const at::Tensor& x, const CallSite& place) {
          nets_[m]->passes.set_data(buffers_[m][at.rank].clone());
          auto y = nets_[m]->forward(x, skips(p_.models[m], place));
          buffers_[m][at.rank] = nets_[m]->passes.clone();
          if (reached.count(m) && loss.goes_through(place.call)) samples_[m][at.rank] += x.size(0);
          return y;
        });
    for (const size_t m : reached) {
      const auto gradients = torch::autograd::grad(
          {value}, nets_[m]->parameters(), {}, /*retain_graph=*/true, false, /*allow_unused=*/true);
      for (size_t w = 0; w < gradients.size(); ++w) {
        if (!gradients[w].defined()) continue;
        auto& pending = pending_[m][at.rank][w];
        pending = pending.defined() ? pending + gradients[w] : gradients[w];
      }
    }
  }

  void average_and_step(size_t m, const std::vector<int>& active) {
    const torch::NoGradGuard no_grad;
    const double all = std::accumulate(samples_[m].begin(), samples_[m].end(), 0.0);
    const auto weights = nets_[m]->parameters();
    for (size_t w = 0; w < weights.size(); ++w) {
      for (int rank = 0; rank < world_; ++rank) {
        double scale = 1.0 / (p_.initial_divisor ? world_ : static_cast<int>(active.size()));
        if (p_.models[m].reduction == Reduction::Sum) scale = 1;
        if (p_.models[m].reduction == Reduction::SampleWeighted) scale = samples_[m][rank] / all;
        auto& pending = pending_[m][rank][w];
        if (pending.defined()) weights[w].sub_(pending * (scale * kLearningRate));
        pending = at::Tensor();
      }
    }
    samples_[m].assign(world_, 0.0);
    // The buffers of the last rank with input are sent with the gradients.
    buffers_[m].assign(world_, buffers_[m][active.back()]);
  }

  const Program& p_;
  const int world_;
  std::vector<Net> nets_;
  std::vector<std::vector<std::vector<at::Tensor>>> pending_;  // by model, rank and weight
  std::vector<std::vector<at::Tensor>> buffers_;               // by model and rank
  std::vector<std::vector<double>> samples_;
  std::vector<int> rounds_;  // by rank
};

std::string difference(const States& states, const States& expected) {
  for (size_t i = 0; i < states.size(); ++i) {
    if (!torch::allclose(states[i], expected[i], 1e-9, 1e-12)) {
      return c10::str("state ", i, ": ", states[i], " instead of ", expected[i]);
    }
  }
  return "";
}

}  // namespace

TEST_CASE(
    "random programs of models that share losses train as one process", "[ranks][join][many]") {
  const int world = GENERATE(2, 3, 4);
  const auto chosen = seeds(10);
  std::vector<Program> drawn;
  std::vector<States> expected;
  for (const int seed : chosen) {
    drawn.push_back(draw_program(seed * 3 + world, world));
    expected.push_back(SingleProcess(drawn.back()).replay());
  }
  const auto results =
      run_ranks<std::vector<std::string>>(world, kLongTimeout, [&](const Rank& self) {
        std::vector<std::string> differences;
        for (size_t i = 0; i < drawn.size(); ++i) {
          const auto text = difference(train(drawn[i], self), expected[i]);
          if (!text.empty()) {
            differences.push_back(c10::str("seed ", chosen[i] * 3 + world, ": ", text));
          }
        }
        return differences;
      });
  for (const auto& differences : results) {
    CAPTURE(world);
    CHECK(differences == std::vector<std::string>());
  }
}

}  // namespace ddp::join_models
