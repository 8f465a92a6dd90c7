// Pipelines beside one process with the whole model and the whole batch, in double.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr auto kGPipe = ddp::PipelineSchedule::GPipe;
constexpr auto kOneFOneB = ddp::PipelineSchedule::OneFOneB;
constexpr auto kInterleaved = ddp::PipelineSchedule::Interleaved;

ddp::PipelineOptions options_of(
    const Rank& self, ddp::PipelineSchedule schedule, int64_t microbatches) {
  return ddp::PipelineOptions()
      .process_group(self.group)
      .schedule(schedule)
      .microbatches(microbatches);
}

struct Plan {
  ddp::PipelineSchedule schedule = kOneFOneB;
  int64_t chunks = 1;
  int64_t microbatches = 1;
};

/// What a rank trains: its layers of the whole network, which it trains beside them.
struct Beside {
  Beside(const Rank& self, const Plan& plan)
      : self(self),
        whole(self.size * plan.chunks),
        pipeline(
            layers(self, plan.chunks), self.rank, self.size, pipeline_loss,
            options_of(self, plan.schedule, plan.microbatches)),
        whole_optimizer(pipeline_optimizer(whole.parameters())),
        optimizer(pipeline_optimizer(pipeline.parameters())) {}

  static std::vector<Layer> layers(const Rank& self, int64_t chunks) {
    std::vector<Layer> layers;
    for (int64_t c = 0; c < chunks; ++c) layers.emplace_back(c * self.size + self.rank);
    return layers;
  }

  bool is_first() const { return self.rank == 0; }
  bool is_last() const { return self.rank == self.size - 1; }

  std::vector<at::Tensor> own_of_whole() const {
    std::vector<at::Tensor> own;
    for (size_t k = static_cast<size_t>(self.rank); k < whole.layers.size();
         k += static_cast<size_t>(self.size)) {
      for (const auto& p : whole.layers[k]->parameters()) own.push_back(p);
    }
    return own;
  }

  ddp::PipelineResult step(const PipelineBatch& batch) {
    return pipeline.step(
        is_first() ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        is_last() ? batch.target : at::Tensor());
  }

  /// Runs a step of both; returns how much they differ.
  double train(int64_t rows, int64_t seed) {
    const auto batch = pipeline_batch(rows, seed);
    whole_optimizer.zero_grad();
    optimizer.zero_grad();
    const auto output = whole.forward(batch.input);
    const auto loss = pipeline_loss(output, batch.target);
    loss.backward();
    const auto result = step(batch);
    whole_optimizer.step();
    optimizer.step();
    double difference = largest_difference(own_of_whole(), pipeline.parameters());
    if (is_last()) {
      auto mean = at::zeros_like(loss);
      const auto parts = batch.target.tensor_split(static_cast<int64_t>(result.losses.size()));
      for (size_t i = 0; i < parts.size(); ++i) {
        mean += result.losses[i] * parts[i].size(0) / static_cast<double>(rows);
      }
      difference = std::max(difference, largest_difference({loss, output}, {mean, result.output}));
    } else if (result.output.defined() || !result.losses.empty()) {
      difference = 1e300;
    }
    return difference;
  }

  const Rank& self;
  WholeNet whole;
  ddp::PipelineStage<Layer> pipeline;
  torch::optim::SGD whole_optimizer, optimizer;
};

/// Runs `body` on each rank; returns the largest result.
double largest_of_ranks(int ranks, const std::function<double(const Rank&)>& body) {
  const auto results = run_ranks<double>(ranks, body);
  return *std::max_element(results.begin(), results.end());
}

TEST_CASE("a pipeline trains as one process, whatever the schedule and the micro-batches") {
  const int ranks = GENERATE(1, 2, 3, 4);
  CAPTURE(ranks);
  const auto difference = largest_of_ranks(ranks, [](const Rank& self) {
    double largest = 0;
    for (const auto& [schedule, chunks] : std::vector<std::pair<ddp::PipelineSchedule, int64_t>>{
             {kGPipe, 1}, {kOneFOneB, 1}, {kInterleaved, 2}}) {
      for (int64_t microbatches = 1; microbatches <= 8; ++microbatches) {
        Beside run(self, {schedule, chunks, microbatches});
        // Rows that no number of micro-batches divides, and others in the next step.
        for (int64_t s = 0; s < 2; ++s) {
          largest = std::max(largest, run.train(2 * microbatches + s, s));
        }
      }
    }
    return largest;
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("a pipeline of one rank with several chunks") {
  const auto [schedule, chunks] = GENERATE(
      std::pair<ddp::PipelineSchedule, int64_t>{kGPipe, 3},
      std::pair<ddp::PipelineSchedule, int64_t>{kInterleaved, 3});
  const auto difference = largest_of_ranks(1, [&, s = schedule, c = chunks](const Rank& self) {
    Beside run(self, {s, c, 3});
    return std::max(run.train(7, 0), run.train(8, 1));
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("more micro-batches than a ring of messages has slots") {
  const auto schedule = GENERATE(kGPipe, kOneFOneB);
  const auto difference = largest_of_ranks(2, [&](const Rank& self) {
    Beside run(self, {schedule, 1, 80});
    return std::max(run.train(80, 0), run.train(81, 1));
  });
  CHECK(difference < 1e-12);
}

/// Counts the receives of all threads of this process.
class CountedReceives {
 public:
  CountedReceives()
      : handle_(at::addGlobalCallback(at::RecordFunctionCallback(&CountedReceives::count)
                                          .scopes({at::RecordScope::FUNCTION}))) {
    count_ = 0;
  }
  ~CountedReceives() { at::removeCallback(handle_); }
  CountedReceives(const CountedReceives&) = delete;
  CountedReceives& operator=(const CountedReceives&) = delete;

  static int64_t value() { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    if (std::string(call.name()) == "c10d::recv_") ++count_;
    return nullptr;
  }
  static inline std::atomic<int64_t> count_{0};
  at::CallbackHandle handle_;
};

TEST_CASE("a boundary between stages has two messages a micro-batch, and their headers") {
  const auto schedule = GENERATE(kGPipe, kOneFOneB);
  const int64_t m = GENERATE(1, 5);
  struct Counts {
    int64_t sends, others;
  };
  const CountedReceives receives;
  const auto counts = run_ranks<Counts>(3, [&](const Rank& self) {
    Beside run(self, {schedule, 1, m});
    const auto batch = pipeline_batch(m + 1, 0);
    run.step(batch);
    const CountedCalls calls;
    run.step(batch);
    return Counts{
        calls.of("c10d::send"),
        calls.of("c10d::allreduce_") + calls.of("c10d::allgather_") + calls.of("c10d::barrier")};
  });
  for (int64_t rank = 0; rank < 3; ++rank) {
    const int64_t boundaries = rank == 1 ? 2 : 1;
    CAPTURE(rank);
    CHECK(counts[static_cast<size_t>(rank)].sends == 2 * m * boundaries);
    CHECK(counts[static_cast<size_t>(rank)].others == 0);
  }
  // Two steps; each boundary has two directions.
  CHECK(CountedReceives::value() == 2 * (2 * m) * 4);
}

TEST_CASE("evaluation runs forwards, of any number of rows, and leaves gradients alone") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    Beside run(self, {kInterleaved, 2, 4});
    double largest = run.train(9, 0);
    const auto gradients = [&] {
      std::vector<at::Tensor> all;
      for (const auto& p : run.pipeline.parameters()) all.push_back(p.grad().clone());
      return all;
    };
    const auto before = gradients();
    for (const int64_t rows : {8, 3, 1}) {
      const auto batch = pipeline_batch(rows, rows);
      const auto output = run.pipeline.eval(
          run.is_first() ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{});
      if (run.is_last() != output.defined() || (output.defined() && output.requires_grad())) {
        return 1e300;
      }
      if (output.defined()) {
        const torch::NoGradGuard no_grad;
        largest = std::max(largest, largest_difference({run.whole.forward(batch.input)}, {output}));
      }
    }
    return std::max({largest, largest_difference(before, gradients()), run.train(8, 1)});
  });
  CHECK(difference < 1e-12);
}

/// Tells whether a graph would be built.
struct GraphlessImpl : torch::nn::Module {
  explicit GraphlessImpl(int64_t k) : layer(register_module("layer", Layer(k))) {}
  at::Tensor forward(const at::Tensor& x) {
    builds_graph = builds_graph || torch::GradMode::is_enabled() || x.requires_grad();
    return layer->forward(x);
  }
  Layer layer;
  bool builds_graph = false;
};
TORCH_MODULE(Graphless);

TEST_CASE("evaluation builds no graphs") {
  const auto graphs = run_ranks<int>(2, [](const Rank& self) -> int {
    const Graphless layer(self.rank);
    ddp::PipelineStage pipeline(layer, self.rank, 2, pipeline_loss, options_of(self, kOneFOneB, 2));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(pipeline_batch(4, 0).input);
    pipeline.eval(inputs);
    return layer->builds_graph;
  });
  CHECK(graphs == std::vector<int>{0, 0});
}

TEST_CASE("gradients of several steps add up, are scaled by scale_loss, and reach the inputs") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    WholeNet whole(2);
    Layer layer(self.rank);
    const auto scale = [](const at::Tensor& loss) { return loss * 8; };
    ddp::PipelineStage pipeline(
        layer, self.rank, self.size, pipeline_loss,
        options_of(self, kOneFOneB, 3).scale_loss(scale));
    double largest = 0;
    for (int64_t s = 0; s < 2; ++s) {
      const auto batch = pipeline_batch(7 + s, s);
      // The second input has a graph, through which backward may go once.
      auto leaf = batch.input.clone().requires_grad_();
      auto whole_leaf = batch.input.clone().requires_grad_();
      const auto used = [&](const at::Tensor& t) { return s == 0 ? t : t.exp(); };
      const auto loss = pipeline_loss(whole.forward(used(whole_leaf)), batch.target);
      (8 * loss).backward();
      std::vector<at::Tensor> inputs;
      if (self.rank == 0) inputs.push_back(used(leaf));
      const auto result = pipeline.step(inputs, self.rank == 1 ? batch.target : at::Tensor());
      if (self.rank == 0)
        largest = std::max(largest, largest_difference({whole_leaf.grad()}, {leaf.grad()}));
    }
    const auto expected = whole.layers[static_cast<size_t>(self.rank)]->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(
          largest, largest_difference({expected[i].grad()}, {layer->parameters()[i].grad()}));
    }
    return largest;
  });
  CHECK(difference < 1e-11);
}

TEST_CASE("scale_grads(false) leaves the loss function's scale") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    WholeNet whole(2);
    const auto batch = pipeline_batch(7, 0);
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
      return (output - target).pow(2).sum() / 7;
    };
    loss(whole.forward(batch.input), batch.target).backward();
    Layer layer(self.rank);
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, loss, options_of(self, kGPipe, 3).scale_grads(false));
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)]->fc->weight;
    return largest_difference({expected.grad()}, {layer->fc->weight.grad()});
  });
  CHECK(difference < 1e-12);
}

/// Passes on several tensors: a state, what it was at first, numbers of layers, and a tensor
/// without gradient. Not all of them are used everywhere.
struct CarryImpl : torch::nn::Module {
  using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  explicit CarryImpl(int64_t k) : layer(register_module("layer", Layer(k))) {}
  Result forward(
      const at::Tensor& x, const at::Tensor& first, const at::Tensor& ids, const at::Tensor& plain,
      const at::Tensor& none) {
    const auto picked = layer->forward(x) + first * plain + ids.unsqueeze(1);
    return {picked, first, ids + 1, plain * 2, none};
  }
  Layer layer;
};
TORCH_MODULE(Carry);

struct CarryEndImpl : CarryImpl {
  using CarryImpl::CarryImpl;
  at::Tensor forward(
      const at::Tensor& x, const at::Tensor& first, const at::Tensor& ids, const at::Tensor& plain,
      const at::Tensor& none) {
    TORCH_CHECK(!none.defined() && ids.scalar_type() == at::kLong && !plain.requires_grad());
    return std::get<0>(CarryImpl::forward(x, first, ids, plain, none));
  }
};
TORCH_MODULE(CarryEnd);

TEST_CASE("several tensors pass, of integers, without gradient, undefined, and passed through") {
  const auto difference = largest_of_ranks(3, [](const Rank& self) {
    const auto batch = pipeline_batch(5, 0);
    const auto first = pipeline_batch(5, 1).input.requires_grad_();
    const auto ids = torch::arange(5), plain = pipeline_batch(5, 2).input;
    Carry one(0), two(1);
    CarryEnd end(2);
    auto [x, f, i, p, n] = one->forward(batch.input, first, ids, plain, {});
    std::tie(x, f, i, p, n) = two->forward(x, f, i, p, n);
    pipeline_loss(end->forward(x, f, i, p, n), batch.target).backward();
    const auto options = options_of(self, kOneFOneB, 2);
    if (self.rank == 2) {
      CarryEnd own(2);
      ddp::PipelineStage pipeline(own, 2, 3, pipeline_loss, options);
      pipeline.step({}, batch.target);
      return largest_difference({end->layer->fc->weight.grad()}, {own->layer->fc->weight.grad()});
    }
    Carry own(self.rank);
    ddp::PipelineStage pipeline(own, self.rank, 3, ddp::LossFn(), options);
    const auto own_first = first.detach().requires_grad_();
    pipeline.step(
        self.rank == 0 ? std::vector<at::Tensor>{batch.input, own_first, ids, plain, {}}
                       : std::vector<at::Tensor>{},
        {});
    const auto& expected = self.rank == 0 ? one : two;
    const auto of_input =
        self.rank == 0 ? largest_difference({first.grad()}, {own_first.grad()}) : 0;
    return std::max(
        of_input,
        largest_difference({expected->layer->fc->weight.grad()}, {own->layer->fc->weight.grad()}));
  });
  CHECK(difference < 1e-12);
}

/// Returns many tensors of many dimensions, whose description needs a second part.
struct ManyImpl : torch::nn::Module {
  ManyImpl() : layer(register_module("layer", Layer(0))) {}
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    for (const auto& column : layer->forward(x).unbind(1)) {
      for (int copies = 0; copies < 3; ++copies) parts.push_back(column.view({-1, 1, 1, 1, 1}));
    }
    return parts;
  }
  Layer layer;
};
TORCH_MODULE(Many);
struct ManyEndImpl : torch::nn::Module {
  ManyEndImpl() : layer(register_module("layer", Layer(1))) {}
  at::Tensor forward(const std::vector<at::Tensor>& parts) {
    auto x = torch::stack(parts, 1).flatten(1);
    return layer->forward(x.view({-1, kPipelineWidth, 3}).sum(2));
  }
  Layer layer;
};
TORCH_MODULE(ManyEnd);

TEST_CASE("a message of many tensors, whose header has a second part") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    const auto batch = pipeline_batch(5, 0);
    Many many;
    ManyEnd end;
    pipeline_loss(end->forward(many->forward(batch.input)), batch.target).backward();
    const auto options = options_of(self, kGPipe, 2);
    if (self.rank == 0) {
      Many own;
      ddp::PipelineStage(own, 0, 2, ddp::LossFn(), options).step({batch.input}, {});
      return largest_difference({many->layer->fc->weight.grad()}, {own->layer->fc->weight.grad()});
    }
    ManyEnd own;
    ddp::PipelineStage(own, 1, 2, pipeline_loss, options).step({}, batch.target);
    return largest_difference({end->layer->fc->weight.grad()}, {own->layer->fc->weight.grad()});
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("frozen stages") {
  const int64_t frozen = GENERATE(0, 1);
  const auto difference = largest_of_ranks(3, [&](const Rank& self) {
    const auto batch = pipeline_batch(7, 0);
    WholeNet whole(3);
    const auto freeze = [](Layer& layer) {
      for (auto& p : layer->parameters()) p.requires_grad_(false);
    };
    freeze(whole.layers[static_cast<size_t>(frozen)]);
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    Layer layer(self.rank);
    if (self.rank == frozen) freeze(layer);
    ddp::PipelineStage pipeline(layer, self.rank, 3, pipeline_loss, options_of(self, kOneFOneB, 3));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(batch.input);
    pipeline.step(inputs, self.rank == 2 ? batch.target : at::Tensor());
    const auto& own = layer->fc->weight.grad();
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)]->fc->weight.grad();
    if (own.defined() != expected.defined()) return 1e300;
    return own.defined() ? largest_difference({expected}, {own}) : 0;
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("a Sequential is a stage; layouts have the names of its module") {
  struct Seen {
    double difference;
    std::vector<std::string> names;
  };
  const auto seen = run_ranks<Seen>(2, [](const Rank& self) {
    const auto batch = pipeline_batch(6, 0);
    WholeNet whole(4);
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    const auto of = [&](int64_t k) { return Layer(2 * self.rank + k); };
    torch::nn::Sequential layers(of(0), of(1));
    ddp::PipelineStage pipeline(
        layers, self.rank, 2, pipeline_loss, options_of(self, kOneFOneB, 3));
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    Seen seen{0, {}};
    for (const auto& layout : ddp::layouts_of(pipeline)) seen.names.push_back(layout.name);
    for (size_t k = 0; k < 2; ++k) {
      const auto& expected = whole.layers[static_cast<size_t>(2 * self.rank) + k]->fc->weight;
      seen.difference = std::max(
          seen.difference,
          largest_difference({expected.grad()}, {layers[k]->as<Layer>()->fc->weight.grad()}));
    }
    return seen;
  });
  for (const auto& [difference, names] : seen) {
    CHECK(difference < 1e-12);
    CHECK(
        names == std::vector<std::string>{"0.fc.weight", "0.fc.bias", "1.fc.weight", "1.fc.bias"});
  }
}

/// Counts, before each forward, its earlier outputs whose memory is still there.
struct TrackedImpl : torch::nn::Module {
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;
  explicit TrackedImpl(int64_t k) : layer(register_module("layer", Layer(k))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto is_there = [](const Memory& memory) { return !memory.expired(); };
    most_live =
        std::max<int64_t>(most_live, std::count_if(outputs.begin(), outputs.end(), is_there));
    auto y = layer->forward(x);
    const auto storage = y.storage();
    outputs.emplace_back(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()));
    return y;
  }
  Layer layer;
  std::vector<Memory> outputs;
  int64_t most_live = 0;
};
TORCH_MODULE(Tracked);

TEST_CASE("a stage keeps what it sent until it has arrived, and then its graph alone") {
  const auto [schedule, most] = GENERATE(
      std::pair<ddp::PipelineSchedule, int64_t>{kOneFOneB, 1},
      std::pair<ddp::PipelineSchedule, int64_t>{kGPipe, 5});
  const auto live = run_ranks<int64_t>(2, [&, s = schedule](const Rank& self) -> int64_t {
    const auto batch = pipeline_batch(12, 0);
    Tracked tracked(self.rank);
    ddp::PipelineStage pipeline(tracked, self.rank, 2, pipeline_loss, options_of(self, s, 6));
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    return tracked->most_live;
  });
  CHECK(live[0] <= most);
}

TEST_CASE("stats() has the actions of the schedule, and write_trace a row a stage") {
  const auto texts = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    Beside run(self, {kInterleaved, 2, 3});
    run.train(6, 0);
    run.train(6, 1);
    const auto& own = run.pipeline.stats();
    if (own.steps.size() != 2 || own.steps[1].step != 2) return "steps";
    const auto list = run.pipeline.schedule();
    double time = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& [action, stage, begin, end] = own.steps[1].actions.at(i);
      if (action.kind != list[i].kind || action.microbatch != list[i].microbatch) return "action";
      if (stage != list[i].chunk * 2 + self.rank) return "stage";
      if (begin < time || end < begin || end > own.steps[1].total_ms) return "times";
      time = end;
    }
    const auto all = ddp::all_gather_stats(own, self.group);
    if (all.steps.size() != 4 || all.bubble() <= 0 || all.bubble() >= 1) return "bubble";
    if (all.steps[3].actions.at(1).begin_ms <= 0) return "gathered";
    const TemporaryFolder folder;
    ddp::write_trace(folder.file("trace.json"), all);
    std::ifstream file(folder.file("trace.json"));
    std::string trace{std::istreambuf_iterator<char>(file), {}};
    const auto count = [&](const std::string& text) {
      int64_t found = 0;
      for (auto at = trace.find(text); at != std::string::npos; at = trace.find(text, at + 1)) {
        ++found;
      }
      return found;
    };
    if (count("\"name\":\"thread_name\"") != 4 || count("stage 3 on rank 1") != 1) return "rows";
    if (count("\"name\":\"B2\"") != 8 || count("\"ph\":\"X\"") != 48) return "boxes";
    return ddp::summary(all).substr(0, 5);
  });
  CHECK(texts == std::vector<std::string>{"step ", "step "});
}

TEST_CASE("schedule() is the rank's list") {
  const auto lists = run_ranks<std::string>(2, [](const Rank& self) {
    Beside run(self, {kOneFOneB, 1, 4});
    std::string list;
    for (const auto& action : run.pipeline.schedule()) {
      list += action.kind + std::to_string(action.microbatch) + " ";
    }
    return list;
  });
  CHECK(lists[0] == "F0 F1 B0 F2 B1 F3 B2 B3 ");
  CHECK(lists[1] == "F0 B0 F1 B1 F2 B2 F3 B3 ");
}

}  // namespace
