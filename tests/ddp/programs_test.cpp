// Complete programs: a policy with an actor and a saver on threads of their own, a
// scene that densifies, an actor and a critic under one loss scale.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::programs {
namespace {

using namespace testing;

// A policy over two actions: action 0 is right where the first number is above 0.
class PolicyImpl : public torch::nn::Cloneable<PolicyImpl> {
 public:
  PolicyImpl() { reset(); }
  void reset() override {
    hidden = register_module("hidden", torch::nn::Linear(4, 16));
    action = register_module("action", torch::nn::Linear(16, 2));
  }
  at::Tensor forward(const at::Tensor& state) {
    return action(torch::tanh(hidden(state))).to(at::kFloat);
  }
  torch::nn::Linear hidden{nullptr}, action{nullptr};
};
TORCH_MODULE(Policy);

struct Rollout {
  at::Tensor states, actions, rewards;
};

Rollout play(Policy& policy, at::Generator& random) {
  const torch::NoGradGuard no_grad;
  const auto states = torch::rand({32, 4}, random) * 2 - 1;
  const auto chances = torch::softmax(policy->forward(states), 1);
  const auto actions = chances.multinomial(1, /*replacement=*/true, random).squeeze(1);
  const auto wanted = (states.select(1, 0) <= 0).to(at::kLong);
  return {states, actions, (actions == wanted).to(at::kFloat)};
}

// Plays on a thread of its own. The learner takes rollouts from it, and updates its policy.
class Actor {
 public:
  Actor(Policy policy, int seed) : policy_(std::move(policy)), seed_(seed) {}
  ~Actor() {
    is_done_ = true;
    changed_.notify_all();
    thread_.join();
  }
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;

  Rollout next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !rollouts_.empty(); });
    auto rollout = std::move(rollouts_.front());
    rollouts_.pop_front();
    changed_.notify_all();
    return rollout;
  }
  template <typename Update>
  void update(const Update& update) {
    const std::lock_guard<std::mutex> lock(policy_mutex_);
    update(*policy_);
  }

 private:
  void run() {
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed_);
    while (!is_done_) {
      Rollout rollout;
      {
        const std::lock_guard<std::mutex> lock(policy_mutex_);
        rollout = play(policy_, random);
      }
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return is_done_ || rollouts_.size() < 2; });
      rollouts_.push_back(std::move(rollout));
      changed_.notify_all();
    }
  }

  Policy policy_;
  const int seed_;
  std::mutex policy_mutex_, mutex_;
  std::condition_variable changed_;
  std::deque<Rollout> rollouts_;
  std::atomic<bool> is_done_{false};
  std::thread thread_{[this] { run(); }};
};

struct Training {
  double first_rewards = 0, last_rewards = 0;
  at::Tensor parameters;
  int saved = 0;
  std::string fault;
};

// The checksum of parameters, which tells the steps apart.
double sum_of(const std::vector<at::Tensor>& parameters) {
  return flattened(parameters).sum().item<double>();
}

Training train_policy(const Rank& self) {
  constexpr int kSteps = 150;
  Policy policy;
  DistributedDataParallel<Policy> model(
      policy, in(self).mixed_precision(MixedPrecision().param_dtype(at::kBFloat16)));
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.02));
  Actor actor(model->snapshot(), /*seed=*/self.rank);

  Training result;
  std::set<double> of_steps{sum_of(model->parameters())};
  std::vector<double> saved;
  std::atomic<bool> is_done{false};
  std::thread saver([&] {
    try {
      while (!is_done) {
        std::stringstream file;
        torch::save(model, file);
        Policy loaded;
        torch::load(loaded, file);
        saved.push_back(sum_of(loaded->parameters()));
      }
    } catch (const std::exception& e) {
      result.fault = e.what();
    }
  });
  for (int step = 0; step < kSteps; ++step) {
    const auto rollout = actor.next();
    optimizer.zero_grad();
    const auto chances = torch::log_softmax(model->forward(rollout.states), 1);
    const auto taken = chances.gather(1, rollout.actions.unsqueeze(1)).squeeze(1);
    (-(rollout.rewards - 0.5) * taken).mean().backward();
    optimizer.step();
    of_steps.insert(sum_of(model->parameters()));
    actor.update([&](torch::nn::Module& copy) { model->update_snapshot(copy); });
    const double reward = rollout.rewards.mean().item<double>();
    if (step < 10) result.first_rewards += reward / 10;
    if (step >= kSteps - 10) result.last_rewards += reward / 10;
  }
  is_done = true;
  saver.join();
  for (const double sum : saved) {
    if (!of_steps.count(sum)) result.fault = "saved what no step has left";
  }
  result.saved = static_cast<int>(saved.size());
  result.parameters = flattened(policy->parameters());
  return result;
}

// A scene of points, whose values are summed with weights that depend on where a pixel is.
class SceneImpl : public torch::nn::Module {
 public:
  SceneImpl() {
    at = register_parameter("at", torch::linspace(-1, 1, 3, at::kDouble));
    color = register_parameter("color", torch::linspace(0.2, 0.4, 3, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& pixels) {
    const auto weights = torch::exp(-(pixels.unsqueeze(1) - at.unsqueeze(0)).square() * 4);
    return (weights * color).sum(1);
  }
  at::Tensor at, color;
};
TORCH_MODULE(Scene);

at::Tensor loss_of(const at::Tensor& image, const at::Tensor& pixels) {
  return (image - torch::sin(3 * pixels)).square().mean();
}

at::Tensor pixels_of(int rank, int step) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
  return torch::rand({16}, random, at::kDouble) * 2 - 1;
}

// Splits each point into two, and gives both the point's state of the optimizer.
void densify(Scene& scene, torch::optim::Adam& optimizer) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : scene->parameters()) {
    const bool is_color = parameter.is_same(scene->color);
    const auto twice = torch::cat({parameter, parameter}) * (is_color ? 0.5 : 1.0);
    parameter.set_data(is_color ? twice : twice + torch::linspace(0, 0.1, twice.numel()));
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    auto& state = static_cast<torch::optim::AdamParamState&>(*found->second);
    state.exp_avg(torch::cat({state.exp_avg(), state.exp_avg()}));
    state.exp_avg_sq(torch::cat({state.exp_avg_sq(), state.exp_avg_sq()}));
  }
}

template <typename Step, typename AfterGrowth>
at::Tensor train_scene(Scene& scene, const Step& step, const AfterGrowth& after_growth) {
  torch::optim::Adam optimizer(scene->parameters(), torch::optim::AdamOptions(0.02));
  for (int i = 0; i < 60; ++i) {
    optimizer.zero_grad();
    step(i).backward();
    optimizer.step();
    if (i == 20 || i == 40) {
      densify(scene, optimizer);
      after_growth();
    }
  }
  return flattened(scene->parameters());
}

// An actor and a critic that share one scale, with one backward pass for both losses.
struct Pair {
  std::vector<double> scales;
  std::vector<int> steps;  // bit 0: the actor stepped; bit 1: the critic
  at::Tensor parameters;
};

torch::nn::Linear small_net(double value) {
  torch::nn::Linear net(3, 1);
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.fill_(value);
  return net;
}

template <typename Losses>
Pair train_pair(const std::vector<torch::nn::Linear>& nets, const Losses& losses) {
  torch::optim::SGD actor_optimizer(
      nets[0]->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  torch::optim::Adam critic_optimizer(nets[1]->parameters(), torch::optim::AdamOptions(0.1));
  GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(4));
  Pair result;
  for (int step = 0; step < 12; ++step) {
    actor_optimizer.zero_grad();
    critic_optimizer.zero_grad();
    scaler.scale(losses(step)).backward();
    const int actor_stepped = scaler.step(actor_optimizer);
    const int critic_stepped = scaler.step(critic_optimizer);
    result.steps.push_back(actor_stepped + 2 * critic_stepped);
    scaler.update();
    result.scales.push_back(scaler.get_scale());
  }
  auto parameters = nets[0]->parameters();
  for (const auto& p : nets[1]->parameters()) parameters.push_back(p);
  result.parameters = flattened(parameters);
  return result;
}

// In step 5 one rank's batch overflows, in the actor alone.
at::Tensor observations(int rank, int step, bool overflows) {
  auto x = torch::linspace(-1, 1, 6).view({2, 3}) * (1 + rank + 0.1 * step);
  if (overflows && step == 5 && rank == 1) x = x * std::numeric_limits<float>::infinity();
  return x;
}

}  // namespace

TEST_CASE("a policy learns while threads of its own act and save", "[ranks][programs]") {
  torch::manual_seed(1);
  const auto results = run_ranks<Training>(2, train_policy);
  for (const auto& result : results) {
    CHECK(result.fault == "");
    CHECK(result.saved > 2);
    CHECK(result.first_rewards < 0.75);
    CHECK(result.last_rewards > 0.85);
  }
  CHECK(torch::equal(results[0].parameters, results[1].parameters));
}

TEST_CASE("a scene that densifies trains as in one process", "[ranks][programs]") {
  Scene alone;
  const auto expected = train_scene(
      alone,
      [&](int i) {
        const auto loss = [&](int rank) {
          return loss_of(alone->forward(pixels_of(rank, i)), pixels_of(rank, i));
        };
        return (loss(0) + loss(1)) / 2;
      },
      [] {});
  REQUIRE(expected.numel() == 24);
  const auto results = run_ranks<at::Tensor>(2, [](const Rank& self) {
    Scene scene;
    DistributedDataParallel<Scene> model(scene, in(self));
    return train_scene(
        scene,
        [&](int i) {
          const auto pixels = pixels_of(self.rank, i);
          return loss_of(model->forward(pixels), pixels);
        },
        [&] { model->refresh(); });
  });
  for (const auto& result : results) CHECK(torch::allclose(result, expected, 0, 1e-9));
}

TEST_CASE(
    "an actor and a critic under one scale skip and step as in one process", "[ranks][programs]") {
  const auto loss = [](const at::Tensor& actor, const at::Tensor& critic) {
    return (actor - critic.detach()).square().mean() + (critic - 1).square().mean();
  };
  std::vector<torch::nn::Linear> alone{small_net(0.5), small_net(0.25)};
  const auto expected = train_pair(alone, [&](int step) {
    const auto of_rank = [&](int rank) {
      return loss(
          alone[0]->forward(observations(rank, step, true)),
          alone[1]->forward(observations(rank, step, false)));
    };
    return (of_rank(0) + of_rank(1)) / 2;
  });
  REQUIRE(expected.steps[5] == 2);  // the critic's gradients are finite
  const auto results = run_ranks<Pair>(2, [&](const Rank& self) {
    std::vector<torch::nn::Linear> nets{small_net(0.5), small_net(0.25)};
    DistributedDataParallel actor(nets[0], in(self));
    DistributedDataParallel critic(nets[1], in(self));
    return train_pair(nets, [&](int step) {
      return loss(
          actor->forward(observations(self.rank, step, true)),
          critic->forward(observations(self.rank, step, false)));
    });
  });
  for (const auto& result : results) {
    CHECK(result.scales == expected.scales);
    CHECK(result.steps == expected.steps);
    CHECK(torch::allclose(result.parameters, expected.parameters, 1e-5, 1e-6));
  }
  CHECK(torch::equal(results[0].parameters, results[1].parameters));
}

}  // namespace ddp::programs
