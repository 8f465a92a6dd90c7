// Random schedules of uneven inputs, compared with one process that replays the same batches.
#include <random>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr double kLearningRate = 0.1;

// The random schedule of one seed; the same on every rank.
struct Schedule {
  std::vector<int> inputs;  // by rank
  int accumulation;
  bool initial_divisor, as_views, find_unused, static_graph, hooked;
  Reduction reduction;
  double cap_mb;
};

Schedule draw(int seed, int world) {
  std::mt19937 random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  Schedule s;
  const bool even = below(8) == 0;
  for (int rank = 0; rank < world; ++rank) {
    s.inputs.push_back(even && rank > 0 ? s.inputs[0] : below(8));
  }
  s.accumulation = 1 + below(3);
  s.initial_divisor = below(2) == 0;
  s.as_views = below(2) == 0;
  s.find_unused = below(3) == 0;
  s.static_graph = !s.find_unused && below(3) == 0;
  const Reduction reductions[] = {
      Reduction::Mean, Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted};
  s.reduction = reductions[below(4)];
  s.hooked = s.reduction == Reduction::Mean && s.initial_divisor && below(3) == 0;
  const double caps[] = {1e-6, 25.0};
  s.cap_mb = caps[below(2)];
  return s;
}

// Three weights, of which some passes skip the last, and a buffer that every pass changes.
class NetImpl : public torch::nn::Module {
 public:
  NetImpl() {
    for (const char* name : {"a", "b", "c"}) register_parameter(name, torch::full({3}, 0.5));
    passes = register_buffer("passes", torch::zeros({1}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x, bool skip) {
    passes.add_(x.sum().to(at::kDouble));
    const auto weights = parameters();
    auto y = torch::tanh(x * weights[0]) * weights[1];
    if (!skip) y = y + weights[2] * x;
    return y.pow(2).sum(1).mean();
  }
  at::Tensor passes;
};
TORCH_MODULE(Net);

at::Tensor batch_of(int rank, int round) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(rank * 100 + round);
  return torch::rand({1 + (rank + 2 * round) % 3, 3}, generator);
}

bool skips(const Schedule& s, int rank, int round) {
  return s.find_unused && (rank + round) % 3 == 0;
}

bool reduces(const Schedule& s, int round) { return (round + 1) % s.accumulation == 0; }

// The parameters and the buffer after training, and the gradients of every averaged pass.
struct Outcome {
  std::vector<at::Tensor> state, gradients;
};

Outcome train(const Schedule& s, const Rank& self) {
  Net net;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions()
               .process_group(self.group)
               .bucket_cap_mb(s.cap_mb)
               .gradient_as_bucket_view(s.as_views)
               .find_unused_parameters(s.find_unused)
               .static_graph(s.static_graph)
               .reduction(s.reduction));
  if (s.hooked) model->register_comm_hook(hooks::all_reduce(self.group));
  torch::optim::SGD optimizer(net->parameters(), kLearningRate);
  Outcome outcome;
  const auto body = [&] {
    for (int round = 0; round < s.inputs[self.rank]; ++round) {
      const auto pass = [&] {
        model->forward(batch_of(self.rank, round), skips(s, self.rank, round)).backward();
      };
      if (!reduces(s, round)) {
        const auto guard = model->no_sync();
        pass();
        continue;
      }
      pass();
      for (const auto& gradient : gradients_of(*net)) outcome.gradients.push_back(gradient);
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  model->join(body, JoinOptions().divide_by_initial_world_size(s.initial_divisor));
  outcome.state = state_of(*net);
  return outcome;
}

// Computes in one process what all ranks compute. Ranks with input have equal parameters all the
// time, so one copy is enough; each rank has its own gradients and its own buffer.
Outcome replay(const Schedule& s) {
  Net net;
  const auto weights = net->parameters();
  const int world = static_cast<int>(s.inputs.size());
  const int rounds = *std::max_element(s.inputs.begin(), s.inputs.end());
  const std::vector<at::Tensor> none(weights.size(), torch::zeros({3}));
  std::vector<std::vector<at::Tensor>> pending(world, none);
  std::vector<double> samples(world, 0);
  std::vector<at::Tensor> buffers(world, torch::zeros({1}, at::kDouble));
  Outcome outcome;
  int last = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<int> active;
    for (int rank = 0; rank < world; ++rank) {
      if (s.inputs[rank] > round) active.push_back(rank);
    }
    last = active.back();
    for (const int rank : active) {
      net->passes.set_data(buffers[rank].clone());
      const auto loss = net->forward(batch_of(rank, round), skips(s, rank, round));
      const auto gradients =
          torch::autograd::grad({loss}, weights, {}, std::nullopt, false, /*allow_unused=*/true);
      buffers[rank] = net->passes.clone();
      samples[rank] += static_cast<double>(batch_of(rank, round).size(0));
      for (size_t i = 0; i < weights.size(); ++i) {
        if (gradients[i].defined()) pending[rank][i] = pending[rank][i] + gradients[i];
      }
    }
    if (!reduces(s, round)) continue;
    const double all = std::accumulate(samples.begin(), samples.end(), 0.0);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < weights.size(); ++i) {
      auto sum = torch::zeros({3}, at::kDouble);
      for (int rank = 0; rank < world; ++rank) {
        double scale = 1.0 / (s.initial_divisor ? world : static_cast<int>(active.size()));
        if (s.reduction == Reduction::Sum) scale = 1;
        if (s.reduction == Reduction::SampleWeighted) scale = samples[rank] / all;
        sum += pending[rank][i].to(at::kDouble) * scale;
      }
      outcome.gradients.push_back(sum.to(at::kFloat));
      weights[i].sub_(outcome.gradients.back() * kLearningRate);
    }
    pending.assign(world, none);
    samples.assign(world, 0);
    // The buffers of the last rank with input are sent with the gradients.
    buffers.assign(world, buffers[last]);
  }
  // Of the ranks with the most averaged passes, the highest broadcasts its model at the end.
  for (int rank = 0; rank < world; ++rank) {
    if (s.inputs[rank] / s.accumulation == rounds / s.accumulation) last = rank;
  }
  for (const auto& w : weights) outcome.state.push_back(w.detach().clone());
  outcome.state.push_back(buffers[last]);
  return outcome;
}

std::string difference(const Outcome& rank, const Outcome& expected) {
  const auto close = [](const at::Tensor& a, const at::Tensor& b) {
    return torch::allclose(a, b, 1e-4, 1e-6);
  };
  if (rank.gradients.size() > expected.gradients.size()) return "more averaged passes";
  for (size_t i = 0; i < rank.gradients.size(); ++i) {
    if (!close(rank.gradients[i], expected.gradients[i])) {
      return c10::str(
          "gradient ", i, ": ", rank.gradients[i], " instead of ", expected.gradients[i]);
    }
  }
  for (size_t i = 0; i < rank.state.size(); ++i) {
    if (!close(rank.state[i], expected.state[i])) {
      return c10::str("state ", i, ": ", rank.state[i], " instead of ", expected.state[i]);
    }
  }
  return "";
}

}  // namespace

TEST_CASE("random schedules of uneven inputs train as one process", "[ranks][join][many]") {
  const int world = GENERATE(2, 3, 4);
  struct Result {
    std::vector<std::string> differences;
    std::vector<at::Tensor> states;
  };
  const auto results = run_ranks<Result>(
      world, {std::chrono::seconds(30), std::chrono::seconds(250)}, [&](const Rank& self) {
        Result result;
        for (const int seed : seeds(30)) {
          const auto schedule = draw(seed * 3 + world, world);
          const auto outcome = train(schedule, self);
          const auto text = difference(outcome, replay(schedule));
          if (!text.empty()) {
            result.differences.push_back(c10::str("seed ", seed * 3 + world, ": ", text));
          }
          for (const auto& t : outcome.state) result.states.push_back(t);
        }
        return result;
      });
  for (const auto& result : results) {
    CAPTURE(world);
    CHECK(result.differences == std::vector<std::string>());
    CHECK(all_equal(result.states, results[0].states));  // else ranks end with other models
  }
}

}  // namespace ddp
