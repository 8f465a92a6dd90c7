// Launch order and the overlap with backward, as a recording backend observes them.
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "support/recording_backend.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::Events;

// y = x * w0 * w1 * ... : gradients become ready last weight first.
struct Chain {
  std::vector<NamedParameter> parameters;

  explicit Chain(int length, Events& events) {
    for (int i = 0; i < length; ++i) {
      const auto name = "w" + std::to_string(i);
      auto w = torch::ones({8}).set_requires_grad(true);
      w.register_hook([&events, name](const at::Tensor&) { events.push_back("gradient " + name); });
      parameters.push_back({name, w});
    }
  }

  at::Tensor forward() const {
    auto y = torch::ones({8});
    for (const auto& p : parameters) y = y * p.tensor;
    return y;
  }
};

const ReducerOptions kOneParameterBuckets = ReducerOptions().bucket_cap_mb(1.0 / (1 << 20));

void step(Reducer& reducer, const Chain& chain) {
  reducer.prepare_for_forward();
  const auto loss = chain.forward().sum();
  reducer.prepare_for_backward();
  loss.backward();
}

}  // namespace

TEST_CASE("all-reduces start during backward, in ready order", "[pure][reducer]") {
  Events events;
  const Chain chain(3, events);
  Reducer reducer(chain.parameters, testing::recording_group(0, 2, events), kOneParameterBuckets);

  // The first pass has one bucket, as c10d's; its tail of seventeen elements is the rank's status.
  step(reducer, chain);
  CHECK(
      events == Events{"gradient w2", "gradient w1", "gradient w0", "allreduce 41", "broadcast 3"});
  CHECK_FALSE(reducer.has_rebuilt_buckets());
  CHECK(reducer.bucket_indices() == std::vector<std::vector<size_t>>{{0, 1, 2}});

  events.clear();
  step(reducer, chain);
  CHECK(
      events == Events{
                    "gradient w2", "allreduce 8", "gradient w1", "allreduce 8", "gradient w0",
                    "allreduce 25"});
  CHECK(reducer.has_rebuilt_buckets());
  CHECK(reducer.bucket_indices() == std::vector<std::vector<size_t>>{{2}, {1}, {0}});

  events.clear();
  step(reducer, chain);
  CHECK(events.front() == "gradient w2");  // rebuilt once only
}

TEST_CASE("a bucket that is ready early waits for its turn", "[pure][reducer]") {
  Events events;
  Chain chain(3, events);
  // With find_unused_parameters buckets keep the expected order: here the reverse of the real one.
  std::reverse(chain.parameters.begin(), chain.parameters.end());
  const auto forward = [&] {
    auto y = torch::ones({8});
    for (size_t i = 3; i-- > 0;) y = y * chain.parameters[i].tensor;
    return y;
  };
  Reducer reducer(
      chain.parameters, testing::recording_group(0, 2, events),
      ReducerOptions(kOneParameterBuckets).find_unused_parameters(true));
  reducer.prepare_for_forward();
  const auto loss = forward().sum();
  reducer.prepare_for_backward();
  loss.backward();
  CHECK(
      events == Events{
                    "gradient w2", "gradient w1", "gradient w0", "allreduce 8", "allreduce 8",
                    "allreduce 28"});  // 8, the status and one flag for each parameter
}

TEST_CASE("without prepare_for_backward nothing is sent", "[pure][reducer]") {
  Events events;
  const Chain chain(2, events);
  Reducer reducer(chain.parameters, testing::recording_group(0, 2, events));
  reducer.prepare_for_forward();
  chain.forward().sum().backward();
  CHECK(events == Events{"gradient w1", "gradient w0"});
  step(reducer, chain);
  CHECK(events[events.size() - 2] == "allreduce 33");
  CHECK(events.back() == "broadcast 2");
  // Both passes' gradients, halved: the recording peer contributed zeros.
  CHECK(torch::equal(chain.parameters[0].tensor.grad(), torch::ones({8})));
}

TEST_CASE("a destroyed reducer does not act on its parameters", "[pure][reducer]") {
  Events events;
  const Chain chain(2, events);
  {
    Reducer reducer(chain.parameters, testing::recording_group(0, 2, events));
    step(reducer, chain);
  }
  events.clear();
  chain.forward().sum().backward();
  CHECK(events == Events{"gradient w1", "gradient w0"});
}

TEST_CASE("torch::autograd::grad does not reach the reducer", "[pure][reducer]") {
  Events events;
  const Chain chain(2, events);
  Reducer reducer(chain.parameters, testing::recording_group(0, 2, events));
  reducer.prepare_for_forward();
  const auto loss = chain.forward().sum();
  reducer.prepare_for_backward();
  torch::autograd::grad({loss}, {chain.parameters[0].tensor});
  CHECK(events == Events{"gradient w0"});
}

TEST_CASE("a world of one sends nothing and keeps gradients bit for bit", "[pure][reducer]") {
  Events events;
  const Chain chain(3, events);
  Reducer reducer(chain.parameters, testing::recording_group(0, 1, events), kOneParameterBuckets);
  for (int i = 0; i < 3; ++i) {
    events.clear();
    for (const auto& p : chain.parameters) p.tensor.mutable_grad().reset();
    step(reducer, chain);
    CHECK(events == Events{"gradient w2", "gradient w1", "gradient w0"});
    CHECK(torch::equal(chain.parameters[1].tensor.grad(), torch::ones({8})));
  }
}

}  // namespace ddp
