// FullyShardedDataParallel beside one process with the whole model and the batches of all ranks.
#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Values = std::map<std::string, at::Tensor>;

/// The dtype of tensors that are made without one, while this exists.
struct DefaultDtype {
  explicit DefaultDtype(at::ScalarType dtype) : before(at::get_default_dtype()) {
    torch::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }
  ~DefaultDtype() { torch::set_default_dtype(before); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

  const caffe2::TypeMeta before;
};

/// What training leaves.
struct Outcome {
  Values values;                        // of whole parameters
  Values gradients;                     // of the last step; undefined ones are missing
  std::vector<double> input_gradients;  // sums, by micro-batch
};

/// The loss of one rank and micro-batch.
template <typename Model>
at::Tensor loss_of(Model& model, const NetUse& use, at::Tensor x, int rank) {
  auto loss = model.forward(x, rank);
  if (use.sums_two_passes) loss = loss + model.forward(x * 0.5, rank);
  return loss / use.micro_batches;
}

void run_backward(const at::Tensor& loss, const NetUse& use) {
  if (use.retains) loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

Outcome train_plain(const NetUse& use, int ranks) {
  PlainNet net(use);
  auto optimizer = net_optimizer(net.parameters());
  for (int64_t step = 0; step < use.steps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < use.micro_batches; ++micro) {
      for (int rank = 0; rank < ranks; ++rank) {
        run_backward(loss_of(net, use, net_input(use, step, micro, rank), rank) / ranks, use);
      }
    }
    optimizer.step();
  }
  Outcome outcome;
  for (const auto& item : net.named_parameters()) {
    outcome.values[item.key()] = item.value().detach();
    if (item.value().grad().defined()) outcome.gradients[item.key()] = item.value().grad();
  }
  return outcome;
}

struct ShardedRun {
  ShardedRun(const Rank& self, NetUse net_use)
      : use(std::move(net_use)),
        rank(self.rank),
        model(std::make_shared<ShardedNet>(use), use.options),
        optimizer(net_optimizer(model->parameters())) {}

  void train() {
    for (int64_t step = 0; step < use.steps; ++step) {
      optimizer.zero_grad();
      for (int64_t micro = 0; micro < use.micro_batches; ++micro) {
        if (use.reduces_each || micro + 1 == use.micro_batches) {
          backward(step, micro);
        } else {
          const auto guard = model->no_sync();
          backward(step, micro);
        }
      }
      optimizer.step();
    }
  }

  void backward(int64_t step, int64_t micro) {
    const auto x = net_input(use, step, micro, rank);
    if (use.evaluates_between) {
      const torch::NoGradGuard no_grad;
      (void)model->forward(x, rank);
    }
    std::optional<ddp::save_on_host> saved;
    if (use.saves_on_host) saved.emplace();
    const auto loss = loss_of(*model, use, x, rank);
    saved.reset();
    run_backward(loss, use);
    if (use.input_needs_gradient) TORCH_CHECK(x.grad().defined(), "the input has no gradient");
  }

  void check_sharded() const {
    for (const auto& item : model->named_parameters()) {
      const auto& p = item.value();
      TORCH_CHECK(p.dim() < 2 || p.size(0) == 1, item.key(), " is whole: ", p.sizes());
      if (p.grad().defined()) {
        TORCH_CHECK(
            p.grad().sizes() == p.sizes(), item.key(), " has a gradient ", p.grad().sizes());
      }
    }
  }

  NetUse use;
  int rank;
  ddp::FullyShardedDataParallel<std::shared_ptr<ShardedNet>> model;
  torch::optim::SGD optimizer;
};

/// The largest difference of this rank's shards from the whole values, of each as a part of its
/// largest element or of 1.
double distance(
    const std::vector<ddp::ParameterLayout>& layouts, const Outcome& whole, bool of_gradients) {
  double largest = 0;
  for (const auto& layout : layouts) {
    const auto& values = of_gradients ? whole.gradients : whole.values;
    const auto found = values.find(layout.name);
    const auto& mine = of_gradients ? layout.local.grad() : layout.local;
    if (found == values.end()) {
      TORCH_CHECK(!mine.defined(), layout.name, " has a gradient that it lacks in one process");
      continue;
    }
    TORCH_CHECK(mine.defined(), layout.name, " has no gradient");
    int64_t at = 0;
    for (const auto& box : layout.boxes) {
      auto part = found->second;
      for (size_t d = 0; d < box.size.size(); ++d) {
        part = part.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
      }
      const auto own = mine.detach().reshape({-1}).narrow(0, at, part.numel());
      const auto scale = std::max(1.0, found->second.abs().max().item<double>());
      largest = std::max(largest, (own - part.reshape({-1})).abs().max().item<double>() / scale);
      at += part.numel();
    }
    TORCH_CHECK(at == mine.numel(), layout.name, " has ", mine.numel(), " elements, not ", at);
  }
  return largest;
}

/// What one rank found: how far its shards are from the whole values, and its collectives by unit.
struct Findings {
  double distance = 0;
  std::vector<int64_t> gathers = {}, reductions = {};
};

Findings train_and_compare(const Rank& self, NetUse use, const Outcome& whole) {
  use.options.process_group(self.group);
  ShardedRun run(self, use);
  run.train();
  run.check_sharded();
  const auto layouts = ddp::layouts_of(*run.model);
  TORCH_CHECK(layouts.size() == whole.values.size(), "layouts: ", layouts.size());
  Findings findings;
  findings.distance = std::max(distance(layouts, whole, false), distance(layouts, whole, true));
  for (const auto& unit : run.model->stats().units) {
    findings.gathers.push_back(unit.gathers);
    findings.reductions.push_back(unit.reductions);
  }
  return findings;
}

/// How often each unit is reduced, whatever a rank leaves out.
int64_t expected_reductions(const NetUse& use) {
  const int64_t reduced = use.reduces_each ? use.micro_batches : 1;
  return use.steps * reduced * (use.retains ? 2 : 1);
}

void check_equals_one_process(const NetUse& use, int ranks) {
  const auto whole = train_plain(use, ranks);
  const auto by_rank = run_ranks<Findings>(
      ranks, [&](const Rank& self) { return train_and_compare(self, use, whole); });
  for (const auto& found : by_rank) {
    // In float some units of the last place, whose number depends on the processor's products.
    CHECK(found.distance < (use.dtype == torch::kDouble ? 1e-12 : 4e-6));
    CHECK(found.gathers == by_rank[0].gathers);
    CHECK(found.reductions == std::vector<int64_t>(4, expected_reductions(use)));
  }
}

}  // namespace

TEST_CASE("a sharded model trains as one process", "[ranks][sharded]") {
  const int ranks = GENERATE(1, 2, 3);
  NetUse use;
  std::optional<DefaultDtype> default_dtype;
  SECTION("plain") {}
  SECTION("with another default dtype") {
    default_dtype.emplace(GENERATE(torch::kDouble, torch::kBFloat16));
  }
  SECTION("in float") {
    use.dtype = torch::kFloat;
    use.micro_batches = GENERATE(1, 3);
    use.reduces_each = GENERATE(true, false);
    use.checkpoint = GENERATE(NetUse::Checkpoint::None, NetUse::Checkpoint::Together);
  }
  SECTION("without prefetch") { use.options.prefetch(0); }
  SECTION("kept whole") { use.options.reshard_after_forward(false); }
  SECTION("with gradients of the input") { use.input_needs_gradient = true; }
  SECTION("frozen in the middle") { use.frozen_middle = true; }
  SECTION("frozen in the middle, gradients of the input") {
    use.frozen_middle = use.input_needs_gradient = true;
  }
  SECTION("a unit twice") { use.twice = true; }
  SECTION("a unit twice, kept whole") {
    use.twice = true;
    use.options.reshard_after_forward(false);
  }
  SECTION("in place after a unit") { use.in_place = true; }
  SECTION("two backward passes through a graph") { use.retains = true; }
  SECTION("with evaluation between") { use.evaluates_between = true; }
  SECTION("accumulation, reduced each time") { use.micro_batches = 3; }
  SECTION("accumulation, reduced at the end") {
    use.micro_batches = 3;
    use.reduces_each = false;
  }
  SECTION("checkpoint inside") { use.checkpoint = NetUse::Checkpoint::Inside; }
  SECTION("checkpoint around") { use.checkpoint = NetUse::Checkpoint::Around; }
  SECTION("two checkpoints around a unit") { use.checkpoint = NetUse::Checkpoint::Each; }
  SECTION("a checkpoint around several units") { use.checkpoint = NetUse::Checkpoint::Together; }
  SECTION("checkpoints left out on a rank") {
    use.checkpoint = GENERATE(
        NetUse::Checkpoint::Around, NetUse::Checkpoint::Each, NetUse::Checkpoint::Together);
    use.options.prefetch(GENERATE(0, 1));
    use.leaves_out_on = 0;
  }
  SECTION("saved on the host") { use.saves_on_host = true; }
  SECTION("two forward passes in one backward") { use.sums_two_passes = true; }
  SECTION("an unused parameter") { use.has_unused = true; }
  SECTION("a unit left out on a rank") { use.leaves_out_on = 0; }
  SECTION("a unit left out on another rank, without prefetch") {
    use.leaves_out_on = 1;
    use.options.prefetch(0);
  }
  SECTION("a unit left out on all") { use.leaves_out_on = -1; }
  SECTION("left out on a rank, and a parameter unused") {
    use.leaves_out_on = 1;
    use.has_unused = true;
  }
  check_equals_one_process(use, ranks);
}

TEST_CASE("random uses of a sharded model train as one process", "[ranks][sharded]") {
  for (const auto seed : seeds(20)) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto chance = [&](int one_in) { return random() % static_cast<unsigned>(one_in) == 0; };
    NetUse use;
    const int ranks = 1 + static_cast<int>(random() % 4);
    use.options.prefetch(chance(2) ? 0 : 1);
    if (chance(3)) use.options.reshard_after_forward(chance(2));
    use.steps = 2;
    use.micro_batches = chance(3) ? 2 : 1;
    use.reduces_each = chance(2);
    use.input_needs_gradient = chance(2);
    use.frozen_middle = chance(3);
    use.twice = chance(2);
    use.in_place = chance(3);
    use.retains = chance(4);
    use.evaluates_between = chance(4);
    use.checkpoint = static_cast<NetUse::Checkpoint>(random() % 5);
    use.has_unused = chance(3);
    use.sums_two_passes = chance(4);
    if (chance(2)) use.leaves_out_on = static_cast<int>(random() % 3) - 1;
    if (use.checkpoint != NetUse::Checkpoint::None) use.retains = false;
    use.saves_on_host = chance(4);
    CAPTURE(
        seed, ranks, use.options.prefetch(), use.options.reshard_after_forward().has_value(),
        use.micro_batches, use.reduces_each, use.input_needs_gradient, use.frozen_middle, use.twice,
        use.in_place, use.retains, use.evaluates_between, use.checkpoint, use.has_unused,
        use.sums_two_passes, use.leaves_out_on.value_or(-9), use.saves_on_host);
    check_equals_one_process(use, ranks);
  }
}
