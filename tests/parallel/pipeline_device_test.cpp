// Pipelines on a device that runs nothing before somebody waits for it, over a backend that moves
// batches of messages on a stream, as NCCL does: how often hosts wait, and what a missing wait or
// memory that is free too early would show, as NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <ddp/ddp.h>

#include "parallel/pipeline_beside.h"
#include "pipeline/messages/streamed_messages.h"
#include "support/compare.h"
#include "support/meeting.h"
#include "support/ranks.h"
#include "support/toy_device.h"
#include "support/toy_messages.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

using toy::Device;

/// Without a backend for the hosts, as "cuda:nccl" alone.
RanksOptions over_toy() { return over(toy::register_messages()); }
/// With one, as "cpu:gloo,cuda:nccl".
RanksOptions over_toy_and_gloo() {
  return over(std::string("cpu:gloo,toy:") + toy::register_messages());
}

at::Tensor on_toy(const at::Tensor& tensor) { return tensor.to(c10::Device(at::kPrivateUse1, 0)); }

/// A rank's stages on the device, and the whole network in host memory.
struct OnToy {
  using Change = std::function<void(PipelineOptions&)>;
  OnToy(const Rank& self, const Plan& plan, const Change& change = {})
      : self(self),
        plan(plan),
        whole(self.size * plan.chunks),
        pipeline(make(self, plan, change)) {}

  static PipelineStage<Layer> make(const Rank& self, const Plan& plan, const Change& change) {
    auto options = options_of(self, plan.schedule, plan.microbatches);
    if (change) change(options);
    auto layers = Beside::layers(self, plan.chunks);
    for (auto& layer : layers) layer->to(c10::Device(at::kPrivateUse1, 0));
    return PipelineStage<Layer>(layers, pipeline_loss, options);
  }

  struct Batch {
    std::vector<at::Tensor> inputs;
    at::Tensor target;
  };
  Batch batch(int64_t rows, int64_t seed) const {
    const auto whole_batch = pipeline_batch(rows, seed);
    Batch own;
    if (self.rank == 0) own.inputs = {on_toy(whole_batch.input)};
    if (self.rank == self.size - 1) own.target = on_toy(whole_batch.target);
    return own;
  }
  PipelineResult step(const Batch& batch) {
    for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
    return pipeline.step(batch.inputs, batch.target);
  }

  /// How much the gradients of the latest step differ from those of the whole network.
  double difference(int64_t rows, int64_t seed) {
    const auto whole_batch = pipeline_batch(rows, seed);
    for (auto& layer : whole.layers) layer->zero_grad();
    pipeline_loss(whole.forward(whole_batch.input), whole_batch.target).backward();
    std::vector<at::Tensor> expected, got;
    for (int64_t c = 0; c < plan.chunks; ++c) {
      auto& layer = whole.layers[static_cast<size_t>(c * self.size + self.rank)];
      for (const auto& parameter : layer->parameters()) expected.push_back(parameter.grad());
    }
    for (const auto& parameter : pipeline.parameters())
      got.push_back(toy::on_host(parameter.grad()));
    return largest_difference(expected, got);
  }

  const Rank& self;
  const Plan plan;
  WholeNet whole;
  PipelineStage<Layer> pipeline;
};

/// The work that a call gave the rank's host, and whether its result was right.
struct Cost {
  int host_waits = 0, polls = 0;
  int64_t host_messages = 0;
  double difference = 0;
};

/// Runs `call` on all ranks at a time, and counts.
template <typename Call>
Cost cost_of(Meeting& meeting, const Rank& self, const Call& call) {
  meeting.come();
  if (self.rank == 0) Device::get().forget();
  meeting.come();
  Cost cost;
  {
    const CountedCalls calls;
    call();
    cost.host_messages = calls.of("c10d::send");
  }
  meeting.come();
  cost.host_waits = Device::get().host_waits;
  cost.polls = Device::get().polls;
  meeting.come();
  return cost;
}

const Plan kPlans[] = {{kGPipe, 1, 4},      {kGPipe, 2, 3},       {kOneFOneB, 1, 1},
                       {kOneFOneB, 1, 5},   {kInterleaved, 1, 4}, {kInterleaved, 2, 4},
                       {kInterleaved, 3, 5}};

}  // namespace

TEST_CASE("from the second step on hosts wait for no device, and send no headers", "[ranks]") {
  const int ranks = GENERATE(2, 3, 4);
  const auto plan = GENERATE(from_range(std::begin(kPlans), std::end(kPlans)));
  CAPTURE(ranks, static_cast<int>(plan.schedule), plan.chunks, plan.microbatches);
  Meeting meeting(ranks);
  const int64_t rows = 2 * plan.microbatches;
  const auto costs = run_ranks<std::vector<Cost>>(ranks, over_toy(), [&](const Rank& self) {
    const c10::StreamGuard stream(toy::rank_stream(self.rank));
    OnToy run(self, plan);
    std::vector<Cost> costs;
    for (int64_t seed = 0; seed < 3; ++seed) {
      const auto batch = run.batch(rows, seed);
      costs.push_back(cost_of(meeting, self, [&] { run.step(batch); }));
      costs.back().difference = run.difference(rows, seed);
      meeting.come();
    }
    return costs;
  });
  CHECK(toy::take_faults() == "");
  for (const auto& of_rank : costs) {
    for (const auto& cost : of_rank) {
      CHECK(cost.difference < 1e-12);
      CHECK(cost.host_waits == 0);
      CHECK(cost.polls == 0);
    }
    // The first stage's word, and in the first step headers.
    const auto words = &of_rank == &costs.front() ? ranks - 1 : 0;
    CHECK(of_rank[0].host_messages > words);
    CHECK(of_rank[1].host_messages == words);
    CHECK(of_rank[2].host_messages == words);
  }
}

TEST_CASE("batches of other sizes are learned once, evaluations too", "[ranks]") {
  Meeting meeting(3);
  struct Seen {
    std::vector<int64_t> host_messages;
    double largest = 0;
  };
  const auto options = GENERATE(0, 1) == 0 ? over_toy() : over_toy_and_gloo();
  const auto seen = run_ranks<Seen>(3, options, [&](const Rank& self) {
    const c10::StreamGuard stream(toy::rank_stream(self.rank));
    OnToy run(self, {kOneFOneB, 1, 4});
    Seen seen;
    // The last batch of an epoch is smaller; and an evaluation with fewer rows than micro-batches.
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      for (const int64_t rows : {8, 8, 6}) {
        const auto batch = run.batch(rows, rows + epoch);
        const auto cost = cost_of(meeting, self, [&] { run.step(batch); });
        seen.host_messages.push_back(cost.host_messages);
        seen.largest = std::max(seen.largest, run.difference(rows, rows + epoch));
        meeting.come();
      }
      const auto batch = run.batch(3, epoch);
      at::Tensor output;
      const auto cost = cost_of(meeting, self, [&] { output = run.pipeline.eval(batch.inputs); });
      seen.host_messages.push_back(cost.host_messages);
      if (self.rank == 2) {
        const auto expected = run.whole.forward(pipeline_batch(3, epoch).input);
        seen.largest = std::max(seen.largest, difference(expected, toy::on_host(output)));
      }
      meeting.come();
    }
    return seen;
  });
  CHECK(toy::take_faults() == "");
  for (const auto& of_rank : seen) CHECK(of_rank.largest < 1e-12);
  using Counts = std::vector<int64_t>;
  // Two words; one header a micro-batch and direction.
  CHECK(seen[0].host_messages == Counts{6, 2, 6, 6, 2, 2, 2, 2});
  CHECK(seen[1].host_messages == Counts{8, 0, 8, 4, 0, 0, 0, 0});
  CHECK(seen[2].host_messages == Counts{4, 0, 4, 0, 0, 0, 0, 0});
}

/// Leaves rows out in its second forward, which no size of the batch says.
struct FickleImpl : torch::nn::Module {
  explicit FickleImpl(bool is_fickle) : is_fickle(is_fickle) {}
  at::Tensor forward(const at::Tensor& x) {
    return ++forwards == 2 && is_fickle ? x.narrow(0, 0, 1) : x;
  }
  const bool is_fickle;
  int forwards = 0;
};
TORCH_MODULE(Fickle);

TEST_CASE("what differs from what is known is an error on every rank", "[ranks][errors]") {
  const bool dynamic = GENERATE(false, true);
  const auto errors = errors_of_ranks(3, over_toy(), [&](const Rank& self) {
    const c10::StreamGuard stream(toy::rank_stream(self.rank));
    const auto input = on_toy(torch::ones({4, 2})), target = on_toy(torch::ones({1}));
    const auto loss = [](const at::Tensor& y, const at::Tensor&) { return y.sum(); };
    PipelineStage<Fickle> pipeline(
        Fickle(self.rank == 0), self.rank, 3, loss,
        options_of(self, kOneFOneB, 1).dynamic_shapes(dynamic));
    const std::vector<at::Tensor> inputs =
        self.rank == 0 ? std::vector<at::Tensor>{input} : std::vector<at::Tensor>{};
    for (int step = 0; step < 2; ++step) {
      pipeline.step(inputs, self.rank == 2 ? target : at::Tensor());
    }
    // A rank that has done its part throws in the next step.
    pipeline.step(inputs, self.rank == 2 ? target : at::Tensor());
  });
  if (dynamic) {
    CHECK(errors == std::vector<std::string>(3));
  } else {
    CHECK_THAT(
        errors, Each(
                    ContainsText("F0 of stage 0") && ContainsText("[4, 2] Float") &&
                    ContainsText("[1, 2] Float") && ContainsText("dynamic_shapes(true)")));
  }
  toy::take_faults();
}

TEST_CASE("the times of a step are those of the device, once it has ended it", "[ranks]") {
  Meeting meeting(2);
  struct Seen {
    size_t before = 0, after = 0;
    PipelineStepStats step;
  };
  const auto seen = run_ranks<Seen>(2, over_toy(), [&](const Rank& self) {
    const c10::StreamGuard stream(toy::rank_stream(self.rank));
    OnToy run(self, {kOneFOneB, 1, 3});
    const auto batch = run.batch(6, 0);
    run.step(batch);
    Seen seen;
    meeting.come();
    seen.before = run.pipeline.stats().steps.size();
    meeting.come();
    if (self.rank == 0) Device::get().forget();
    meeting.come();
    seen.after = run.pipeline.stats().steps.size();
    if (seen.after > 0) seen.step = run.pipeline.stats().steps.back();
    return seen;
  });
  for (const auto& of_rank : seen) {
    CHECK(of_rank.before == 0);
    REQUIRE(of_rank.after == 1);
    REQUIRE(of_rank.step.actions.size() == 6);
    // The device's clock ticks once an operation.
    double last = 0;
    for (const auto& action : of_rank.step.actions) {
      CHECK(action.begin_ms >= last);
      CHECK(action.end_ms >= action.begin_ms + 1);
      CHECK(action.end_ms == std::floor(action.end_ms));
      last = action.end_ms;
    }
    CHECK(of_rank.step.total_ms == last);
  }
}

TEST_CASE("of many kinds of batches the latest are known", "[pure]") {
  KnownHeaders known;
  const auto choose = [&](const std::string& batch) {
    const auto choice = known.choose(batch);
    return std::make_pair(choice.number, choice.is_known);
  };
  using Choice = std::pair<int64_t, bool>;
  for (int64_t i = 0; i < KnownHeaders::kMost; ++i) {
    CHECK(choose(std::to_string(i)) == Choice(i, false));
  }
  CHECK(choose("0") == Choice(0, true));
  CHECK(choose("new") == Choice(0, false));
  CHECK(choose("1") == Choice(1, true));
  CHECK(choose("0") == Choice(1, false));
  CHECK(choose("new") == Choice(0, true));
  CHECK_FALSE(choose("").second);
  CHECK_FALSE(choose("").second);
  known.of({3, false}).sent[2] = {};
  CHECK(known.of({3, true}).sent.size() == 1);
  CHECK(known.of({3, false}).sent.empty());
}

TEST_CASE("ranks that call step and eval in other orders throw", "[ranks][errors]") {
  const auto errors = errors_of_ranks(2, over_toy(), [&](const Rank& self) {
    const c10::StreamGuard stream(toy::rank_stream(self.rank));
    OnToy run(self, {kOneFOneB, 1, 2});
    const auto batch = run.batch(4, 0);
    run.step(batch);
    if (self.rank == 0) run.step(batch);
    run.pipeline.eval(batch.inputs);
  });
  CHECK_THAT(
      errors, Each(ContainsText("call 2, eval(), got one of call 2, step() on rank 1 of 2")));
  toy::take_faults();
}

}  // namespace ddp::testing
