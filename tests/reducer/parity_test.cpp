// Trains the same random models with our Reducer, with c10d's, and with gradients averaged by hand
// after each backward pass: all three must agree.
#include <random>

#include <ddp/internal/reducer.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

enum class Shape { Vector, Matrix, Transposed, ChannelsLast, Empty };

// The random choices of one seed; the same on every rank.
struct Recipe {
  int layers;               // depth of the random network
  std::vector<int> parent;  // by layer: the earlier layer that it reads
  std::vector<int> weight;  // by layer: its weight; shared where one appears twice
  std::vector<int> width;   // by weight: the number of elements, or of rows of 3
  std::vector<at::ScalarType> dtype;
  std::vector<Shape> shape;
  std::vector<bool> optional_layer;  // left out of the loss in some steps on some ranks
  double cap_mb;
  bool as_views, find_unused, static_graph, squared;
  bool hooked;       // a communication hook does the averaging
  bool cut_output;   // forward also returns layers that the loss leaves out
  int accumulation;  // backward passes per reduced one
};

Recipe draw(int seed) {
  std::mt19937 random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  Recipe r;
  r.layers = 2 + below(8);
  const int weights = 1 + below(r.layers);
  for (int w = 0; w < weights; ++w) {
    r.width.push_back(1 + below(60));
    const at::ScalarType dtypes[] = {at::kFloat,  at::kFloat,        at::kFloat,
                                     at::kDouble, at::kComplexFloat, at::kHalf};
    r.dtype.push_back(dtypes[below(6)]);
    // Layer 0 has gradients in every pass, so it is never the empty one.
    r.shape.push_back(static_cast<Shape>(below(w == 0 ? 4 : 5)));
  }
  for (int i = 0; i < r.layers; ++i) {
    r.parent.push_back(i == 0 ? 0 : below(i));
    r.weight.push_back(i < weights ? i : below(weights));  // every weight is used at least once
  }
  r.find_unused = below(3) == 0;
  r.static_graph = !r.find_unused && below(3) == 0;
  for (int i = 0; i < r.layers; ++i) {
    // Layer 0 stays: a loss without any parameter has no backward pass.
    r.optional_layer.push_back(i > 0 && r.find_unused && below(2) == 0);
  }
  const double caps[] = {1e-6, 1e-4, 5e-4, 1.0, 25.0};
  r.cap_mb = caps[below(5)];
  r.as_views = below(2) == 0;
  r.accumulation = 1 + below(3);
  r.squared = below(2) == 0;
  r.hooked = below(4) == 0;
  r.cut_output = r.find_unused && below(2) == 0;
  return r;
}

at::Tensor make_weight(Shape shape, int width, const at::Tensor& random) {
  switch (shape) {
    case Shape::Vector:
      return random.narrow(0, 0, width).clone();
    case Shape::Matrix:
      return random.narrow(0, 0, width * 3).view({width, 3}).clone();
    case Shape::Transposed:
      return random.narrow(0, 0, width * 3).view({width, 3}).clone().t();
    case Shape::ChannelsLast:
      return random.narrow(0, 0, width * 8)
          .view({width, 2, 2, 2})
          .contiguous(at::MemoryFormat::ChannelsLast);
    case Shape::Empty:
      return random.narrow(0, 0, 0).clone();
  }
  return {};
}

std::vector<NamedParameter> make_parameters(const Recipe& recipe, int seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<NamedParameter> parameters;
  for (size_t w = 0; w < recipe.width.size(); ++w) {
    const auto random =
        torch::randn({recipe.width[w] * 8}, generator, at::dtype(at::kDouble)).to(recipe.dtype[w]);
    const auto value = make_weight(recipe.shape[w], recipe.width[w], random);
    parameters.push_back({"w" + std::to_string(w), value.detach().set_requires_grad(true)});
  }
  return parameters;
}

struct Forward {
  at::Tensor loss;
  std::vector<at::Tensor> outputs;  // as a module would return them
};

// Layer i: tanh(mean(weight) * parent + sum(weight * position)), a scalar each, in double; the loss
// adds up the layers that are not skipped.
Forward forward(
    const Recipe& recipe, const std::vector<NamedParameter>& parameters, double input, int step,
    int rank) {
  const auto options = at::dtype(at::kDouble);
  std::vector<at::Tensor> values;
  at::Tensor loss = torch::zeros({}, options);
  at::Tensor left_out = torch::zeros({}, options);
  for (int i = 0; i < recipe.layers; ++i) {
    const auto& weight = parameters[recipe.weight[i]].tensor;
    const auto real = weight.is_complex() ? torch::view_as_real(weight) : weight;
    const auto w = real.to(at::kDouble).flatten();
    const auto position = torch::arange(w.numel(), options) / 100;
    const auto below = i == 0 ? torch::full({}, input, options) : values[recipe.parent[i]];
    const auto mean = w.sum() / std::max<int64_t>(w.numel(), 1);
    values.push_back(torch::tanh(mean * below + (w * position).sum()));
    // Which layers are left out differs between steps and ranks.
    const bool skipped = recipe.optional_layer[i] && (step + rank * 7 + i) % 3 != 0;
    auto& sum = skipped ? left_out : loss;
    sum = sum + values.back().pow(recipe.squared ? 2 : 1);
  }
  if (!recipe.cut_output) return {loss, {loss}};
  return {loss, {loss, left_out}};
}

double input_of(int step, int micro, int rank) { return 0.1 * step + 0.03 * micro + 0.2 * rank; }

// The calls of one engine around a training step.
struct Engine {
  std::function<void()> before_forward;
  std::function<void(const Forward&)> after_forward;
  std::function<void()> local_forward;
};

// The gradients after each of five steps; an undefined tensor for an undefined gradient.
std::vector<at::Tensor> train(
    const Recipe& recipe, const std::vector<NamedParameter>& parameters, const Engine& engine,
    int rank) {
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 5; ++step) {
    // Every other step accumulates onto what is there.
    if (step % 2 == 0) {
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
    }
    for (int micro = 0; micro < recipe.accumulation; ++micro) {
      const bool last = micro + 1 == recipe.accumulation;
      if (last) engine.before_forward();
      const auto result = forward(recipe, parameters, input_of(step, micro, rank), step, rank);
      if (last) engine.after_forward(result);
      if (!last) engine.local_forward();
      result.loss.backward();
    }
    for (const auto& p : parameters) {
      const auto& grad = p.tensor.grad();
      if (!grad.defined()) {
        seen.emplace_back();
        continue;
      }
      TORCH_CHECK(grad.sizes() == p.tensor.sizes() && grad.scalar_type() == p.tensor.scalar_type());
      const auto real = grad.is_complex() ? torch::view_as_real(grad) : grad;
      seen.push_back(real.detach().to(at::kDouble).clone());
    }
  }
  return seen;
}

std::vector<at::Tensor> train_ours(const Recipe& recipe, const Rank& self, int seed) {
  const auto parameters = make_parameters(recipe, seed);
  Reducer reducer(
      parameters, self.group,
      ReducerOptions()
          .bucket_cap_mb(recipe.cap_mb)
          .gradient_as_bucket_view(recipe.as_views)
          .find_unused_parameters(recipe.find_unused)
          .static_graph(recipe.static_graph));
  if (recipe.hooked) reducer.register_comm_hook(hooks::all_reduce(self.group));
  return train(
      recipe, parameters,
      {[&] { reducer.prepare_for_forward(); },
       [&](const Forward& result) {
         reducer.prepare_for_backward({result.outputs, true});
       },
       [&] { reducer.prepare_for_local_backward(); }},
      self.rank);
}

// In the first iteration of a static graph c10d reduces only when delay_all_reduce() is called at
// the end; Python's wrapper does that from an identity node after the outputs.
class DelayAllReduce : public torch::autograd::FunctionPreHook {
 public:
  explicit DelayAllReduce(c10d::Reducer& reducer) : reducer_(reducer) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [&reducer = reducer_] { reducer.delay_all_reduce(); });
    return gradients;
  }

 private:
  c10d::Reducer& reducer_;
};

std::vector<at::Tensor> train_c10d(const Recipe& recipe, const Rank& self, int seed) {
  const auto parameters = make_parameters(recipe, seed);
  std::vector<at::Tensor> tensors;
  std::unordered_map<size_t, std::string> names;
  for (const auto& p : parameters) {
    names[tensors.size()] = p.name;
    tensors.push_back(p.tensor);
  }
  const std::vector<bool> sparse(tensors.size(), false);
  const auto cap = static_cast<int64_t>(recipe.cap_mb * 1024 * 1024);
  const auto limit = recipe.find_unused ? cap : std::numeric_limits<int64_t>::max();
  auto buckets = std::get<0>(
      c10d::compute_bucket_assignment_by_size(tensors, {static_cast<size_t>(limit)}, sparse, {}));
  std::reverse(buckets.begin(), buckets.end());
  const auto reducer = std::make_shared<c10d::Reducer>(
      tensors, buckets, self.group, sparse, cap, recipe.find_unused, recipe.as_views, names, cap,
      false, false, std::vector<int64_t>());
  const auto logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  logger->set_construction_data_and_log("random", {}, -1, false, false, recipe.static_graph);
  if (recipe.static_graph) reducer->set_static_graph();
  if (recipe.hooked) reducer->register_builtin_comm_hook(c10d::BuiltinCommHookType::ALLREDUCE);
  bool delayed = !recipe.static_graph;
  return train(
      recipe, parameters,
      {[&] {
         reducer->prepare_for_forward();
         reducer->rebuild_buckets();
       },
       [&](const Forward& result) {
         reducer->prepare_for_backward(result.outputs);
         if (std::exchange(delayed, true)) return;
         result.loss.grad_fn()->add_pre_hook(std::make_unique<DelayAllReduce>(*reducer));
       },
       [] {}},
      self.rank);
}

// Averages the gradients of a backward pass, parameter by parameter.
class ByHand {
 public:
  ByHand(const std::vector<NamedParameter>& parameters, const ProcessGroup& group)
      : parameters_(parameters), group_(group), used_(torch::zeros({size(parameters)})) {
    for (int64_t i = 0; i < size(parameters); ++i) {
      parameters[i].tensor.register_hook([this, i](const at::Tensor&) { used_[i] = 1; });
    }
  }

  void average() {
    const torch::NoGradGuard no_grad;
    sum(used_);
    for (int64_t i = 0; i < size(parameters_); ++i) {
      auto& grad = parameters_[i].tensor.mutable_grad();
      auto average =
          grad.defined() ? grad / group_->getSize() : torch::zeros_like(parameters_[i].tensor);
      sum(average);
      if (used_[i].item<float>() > 0) grad = average;
    }
    used_.zero_();
  }

 private:
  static int64_t size(const std::vector<NamedParameter>& parameters) {
    return static_cast<int64_t>(parameters.size());
  }
  void sum(at::Tensor& t) {
    std::vector<at::Tensor> tensors{t};
    group_->allreduce(tensors)->wait();
  }

  const std::vector<NamedParameter>& parameters_;
  ProcessGroup group_;
  at::Tensor used_;
};

class AverageAtEnd : public torch::autograd::FunctionPreHook {
 public:
  explicit AverageAtEnd(ByHand& by_hand) : by_hand_(by_hand) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [&by_hand = by_hand_] { by_hand.average(); });
    return gradients;
  }

 private:
  ByHand& by_hand_;
};

std::vector<at::Tensor> train_by_hand(const Recipe& recipe, const Rank& self, int seed) {
  const auto parameters = make_parameters(recipe, seed);
  ByHand by_hand(parameters, self.group);
  return train(
      recipe, parameters,
      {[] {},
       [&](const Forward& result) {
         result.loss.grad_fn()->add_pre_hook(std::make_unique<AverageAtEnd>(by_hand));
       },
       [] {}},
      self.rank);
}

// Describes how `a` and `b` differ; "" when they are the same: bitwise or, where sums of more than
// two depend on the order, and where a step adds to the average of the one before, which only ours
// does not average again, within the rounding of their dtypes.
std::string difference(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const Recipe& recipe,
    bool bitwise) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return c10::str("entry ", i, " defined on one side");
    if (!a[i].defined()) continue;
    const bool half = recipe.dtype[i % recipe.dtype.size()] == at::kHalf;
    const auto step = i / recipe.dtype.size();
    const bool same = bitwise && step % 2 == 0
                          ? torch::equal(a[i], b[i])
                          : torch::allclose(a[i], b[i], half ? 5e-3 : 1e-5, half ? 5e-6 : 1e-7);
    if (!same) return c10::str("entry ", i, " by ", (a[i] - b[i]).abs().max().item<double>());
  }
  return a.size() == b.size() ? "" : "lengths";
}

}  // namespace

TEST_CASE("gradients of random models equal c10d's and averages by hand", "[ranks][parity]") {
  const int size = GENERATE(1, 2, 3, 4);
  struct Outcome {
    std::vector<std::string> differences;
    int compared_with_c10d = 0;
  };
  const auto outcomes = run_ranks<Outcome>(
      size, {std::chrono::seconds(30), std::chrono::seconds(200)}, [&](const Rank& self) {
        Outcome outcome;
        for (const int chosen : seeds(20)) {
          const int seed = size + 4 * chosen;
          const auto recipe = draw(seed);
          const auto ours = train_ours(recipe, self, seed);
          const bool bitwise = size <= 2;
          const auto note = [&](const char* other, const std::string& text) {
            if (!text.empty()) {
              outcome.differences.push_back(
                  c10::str("seed ", seed, " against ", other, ": ", text));
            }
          };
          note("averages", difference(ours, train_by_hand(recipe, self, seed), recipe, bitwise));
          // c10d asserts when a static graph begins with a pass that is not reduced, and waits for
          // gradients of outputs that the loss leaves out: Python's wrapper makes those gradients.
          if (recipe.static_graph && recipe.accumulation > 1) continue;
          if (recipe.cut_output) continue;
          note("c10d", difference(ours, train_c10d(recipe, self, seed), recipe, bitwise));
          ++outcome.compared_with_c10d;
        }
        return outcome;
      });
  for (const auto& outcome : outcomes) {
    CAPTURE(size);
    CHECK(outcome.differences == std::vector<std::string>());
    CHECK(outcome.compared_with_c10d >= 5);
  }
}

}  // namespace ddp
