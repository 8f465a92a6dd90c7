#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/deferred_modules.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;

namespace {

constexpr int64_t kWidth = 128;
constexpr int64_t kUnitBytes = kWidth * kWidth * 4;
constexpr int64_t kSmall = 40'000;  // biases, and some states of the generator
constexpr int64_t kState = 5'100;   // one

/// Layers one after the other, and after them another initialization of all, as GPT's.
torch::nn::Sequential layers(int count, bool again) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  const torch::NoGradGuard no_grad;
  if (again) {
    for (auto& parameter : net->parameters()) parameter.normal_(0, 0.02);
  }
  return net;
}

torch::nn::Sequential deferred_layers(int count, bool again) {
  const ddp::DeferredInit guard;
  return layers(count, again);
}

}  // namespace

TEST_CASE("building a deferred module takes no memory", "[deferred][once]") {
  torch::nn::Sequential net(nullptr);
  CHECK(peak_bytes_of([&] { net = deferred_layers(20, true); }) < kSmall);
  CHECK(peak_bytes_of([&] { ddp::materialize(*net); }) < 21 * kUnitBytes + 80 * kState);
  CHECK(peak_bytes_of([&] { net = layers(20, true); }) > 20 * kUnitBytes);
}

TEST_CASE("units are materialized in any order, one at a time", "[deferred][once]") {
  const bool again = GENERATE(false, true);
  torch::manual_seed(7);
  const auto expected = layers(6, again);
  const auto state = generator_state();
  for (const auto& order : std::vector<std::vector<size_t>>{
           {0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1, 0}, {2, 0, 5, 1, 4, 3}}) {
    CAPTURE(again, order);
    torch::manual_seed(7);
    auto net = deferred_layers(6, again);
    bool equal = true;
    const auto peak = peak_bytes_of([&] {
      for (const auto i : order) {
        auto parameters = net->ptr(i)->parameters();
        ddp::materialize(parameters);
        const auto values = expected->ptr(i)->parameters();
        for (size_t k = 0; k < values.size(); ++k) {
          equal = equal && torch::equal(parameters[k], values[k]);
          parameters[k].set_data(torch::empty({0}));  // as if cut
        }
      }
    });
    CHECK(equal);
    CHECK(peak >= kUnitBytes);
    CHECK(peak < 2 * kUnitBytes + 24 * kState + kSmall);
    CHECK(torch::equal(generator_state(), state));
  }
}

TEST_CASE("what nothing needs any more is freed", "[deferred][once]") {
  const auto build = made([](Made& m) {
    for (int i = 0; i < 6; ++i) {
      const auto whole = torch::randn({kWidth, kWidth});
      m.register_buffer("part" + std::to_string(i), whole.narrow(0, 0, 2).clone());
    }
  });
  const auto module = build_deferred(build);
  CHECK(peak_bytes_of([&] { ddp::materialize(*module); }) < 2 * kUnitBytes);

  const auto given = torch::ones({2000});
  for (const bool materialized : {true, false}) {
    auto copy = build_deferred(made([&](Made& m) {
      m.register_buffer("copy", torch::empty({2000}).copy_(given));
      m.register_buffer("other", torch::empty({2000}).copy_(m.buffers()[0]));
    }));
    const auto later = materialized ? build_deferred([] { return of(torch::nn::Linear(3, 3)); })
                                    : nullptr;  // its records stay
    CHECK(given.use_count() > 1);
    if (materialized) {
      ddp::materialize(*copy);
    } else {
      copy.reset();
    }
    CHECK(given.use_count() == 1);
  }
}

TEST_CASE("values of the program's own memory are those of the guard", "[deferred][once]") {
  torch::nn::Linear linear(nullptr);
  {
    std::vector<float> own(30 * 40, 7.0F);
    const auto borrowed = torch::from_blob(own.data(), {30, 40});
    const ddp::DeferredInit guard;
    linear = torch::nn::Linear(40, 30);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(borrowed);
    std::fill(own.begin(), own.end(), 0.0F);  // which no version of a tensor counts
  }
  ddp::materialize(*linear);
  CHECK(torch::equal(linear->weight, torch::full({30, 40}, 7.0F)));
}

TEST_CASE("units share what they were made of", "[deferred][once]") {
  const auto build = made([](Made& m) {
    const auto table = torch::randn({40, 50});
    m.register_parameter("a", table.narrow(0, 0, 20).clone());
    auto b = m.register_parameter("b", torch::empty({20, 50}), false);
    b.copy_(m.named_parameters()["a"].detach()).add_(table.narrow(0, 20, 20));
    m.named_parameters()["a"].detach().mul_(2).add_(torch::rand({50}));
  });
  torch::manual_seed(8);
  const auto expected = build();
  const auto state = generator_state();
  for (const bool reversed : {false, true}) {
    torch::manual_seed(8);
    const auto module = build_deferred(build);
    auto parameters = module->parameters();
    if (reversed) std::swap(parameters[0], parameters[1]);
    for (const auto& parameter : parameters) {
      ddp::materialize({parameter});
      const torch::NoGradGuard no_grad;
      if (parameter.is_same(module->named_parameters()["a"])) continue;
      CHECK(torch::equal(parameter, expected->named_parameters()["b"]));
      parameter.zero_();  // the other is not made of what this became
    }
    CHECK(torch::equal(module->named_parameters()["a"], expected->named_parameters()["a"]));
    CHECK(torch::equal(generator_state(), state));
  }
}

TEST_CASE("handles, views and optimizers stay valid", "[deferred][once]") {
  torch::manual_seed(9);
  const torch::nn::Linear expected(40, 50);
  torch::manual_seed(9);
  torch::nn::Linear net(nullptr);
  {
    const ddp::DeferredInit guard;
    net = torch::nn::Linear(40, 50);
  }
  const auto handle = net->weight;
  const auto row = net->weight.detach()[3], all = net->weight.data();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  ddp::materialize(*net);
  CHECK(torch::equal(handle, expected->weight));
  CHECK(torch::equal(row, expected->weight[3]));
  CHECK(torch::equal(all, expected->weight));
  CHECK(handle._version() == 0);
  net->forward(torch::ones({2, 40})).sum().backward();
  optimizer.step();
  CHECK_FALSE(torch::equal(handle, expected->weight));
  CHECK(torch::equal(row, handle[3]));
}

TEST_CASE("each thread has guards of its own", "[deferred][once]") {
  const ddp::DeferredInit guard;
  torch::nn::Linear deferred(50, 60);
  bool ordinary = false;
  std::string foreign;
  std::thread([&] {
    const torch::nn::Linear net(50, 60);
    ordinary = !ddp::is_deferred(net->weight);
    const ddp::DeferredInit own;
    const torch::NoGradGuard no_grad;
    foreign = error_of([&] { torch::empty({60, 50}).copy_(deferred->weight); });
  }).join();
  CHECK(ordinary);
  CHECK_THAT(foreign, Contains("DeferredInit: expected tensors of this thread's guards"));
  std::thread([&] { ddp::materialize(*deferred); }).join();
  CHECK_FALSE(ddp::is_deferred(deferred->weight));
}

TEST_CASE("ranks as threads draw the same numbers", "[deferred][ranks]") {
  torch::manual_seed(10);
  const torch::nn::Linear expected(60, 70);
  const auto state = generator_state();
  torch::manual_seed(10);
  const auto equal = run_ranks<int>(3, [&](const Rank& self) {
    torch::nn::Linear net(nullptr);
    {
      const ddp::DeferredInit guard;
      net = torch::nn::Linear(60, 70);
    }
    ddp::barrier(self.group);
    ddp::materialize(*net);
    return equal_modules(*net, *expected) ? 1 : 0;
  });
  CHECK(equal == std::vector<int>{1, 1, 1});
  CHECK(torch::equal(generator_state(), state));
}

TEST_CASE("layers cut over a group are deferred", "[deferred][ranks]") {
  const int64_t width = 24;
  torch::manual_seed(11);
  const torch::nn::Linear up(width, 3 * width), down(3 * width, width);
  const torch::nn::Embedding tokens(51, width);
  const torch::nn::MultiheadAttention attention(width, 4);
  const auto state = generator_state();
  torch::manual_seed(11);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    ddp::ColumnParallelLinear column(nullptr);
    ddp::RowParallelLinear row(nullptr);
    ddp::VocabParallelEmbedding vocabulary(nullptr);
    ddp::ParallelMultiheadAttention heads(nullptr);
    {
      const ddp::DeferredInit guard;
      column = ddp::ColumnParallelLinear(ddp::ColumnParallelLinearOptions(width, 3 * width)
                                             .partitions(3)
                                             .process_group(self.group));
      row = ddp::RowParallelLinear(
          ddp::RowParallelLinearOptions(3 * width, width).process_group(self.group));
      vocabulary = ddp::VocabParallelEmbedding(
          ddp::VocabParallelEmbeddingOptions(51, width).process_group(self.group));
      heads = ddp::ParallelMultiheadAttention(
          ddp::ParallelMultiheadAttentionOptions(width, 4).process_group(self.group));
    }
    ddp::barrier(self.group);
    torch::nn::Sequential all(column, row, vocabulary, heads);
    for (const auto& tensor : tensors_of(*all)) {
      if (!ddp::is_deferred(tensor)) throw std::runtime_error("a parameter has values");
    }
    ddp::materialize(*all);
    const ddp::ColumnParallelLinear cut_up(column->options, up->weight, up->bias);
    const ddp::RowParallelLinear cut_down(row->options, down->weight, down->bias);
    const ddp::VocabParallelEmbedding cut_tokens(vocabulary->options, tokens->weight);
    const ddp::ParallelMultiheadAttention cut_heads(heads->options, attention);
    if (!equal_modules(*column, *cut_up)) throw std::runtime_error("column");
    if (!equal_modules(*row, *cut_down)) throw std::runtime_error("row");
    if (!equal_modules(*vocabulary, *cut_tokens)) throw std::runtime_error("vocabulary");
    if (!equal_modules(*heads, *cut_heads)) throw std::runtime_error("heads");
  });
  CHECK(errors == std::vector<std::string>{"", ""});
  CHECK(torch::equal(generator_state(), state));
}

TEST_CASE("ranks that drew other values learn it when they materialize", "[deferred][ranks]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ddp::ColumnParallelLinear net(nullptr);
    {
      static std::mutex one_at_a_time;  // for they share the default generator
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(static_cast<uint64_t>(self.rank));
      const ddp::DeferredInit guard;
      net = ddp::ColumnParallelLinear(
          ddp::ColumnParallelLinearOptions(6, 8).process_group(self.group));
    }
    ddp::barrier(self.group);  // or one seeds the generator while the other repeats its draws
    ddp::materialize(*net);
  });
  CHECK_THAT(
      errors, Each(Contains("ColumnParallelLinear: expected the same random numbers on all")));
}
