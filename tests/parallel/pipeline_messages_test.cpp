// What stages send each other, and how long they keep it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_beside.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

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

/// Counts tensors whose memory is there.
class LiveTensors {
 public:
  void add(const at::Tensor& tensor) {
    const auto storage = tensor.storage();
    memory_.emplace_back(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()));
  }
  int64_t count() const {
    const auto is_there = [](const Memory& memory) { return !memory.expired(); };
    return std::count_if(memory_.begin(), memory_.end(), is_there);
  }

 private:
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::vector<Memory> memory_;
};

/// Counts in each forward its outputs whose memory is still there, before it, and what backward
/// passes need of all micro-batches, this one's too.
struct TrackedImpl : torch::nn::Module {
  explicit TrackedImpl(int64_t k) : layer(register_module("layer", Layer(k))) {}
  at::Tensor forward(const at::Tensor& x) {
    most_outputs = std::max(most_outputs, outputs.count());
    const auto hidden = layer->forward(x);
    auto y = hidden * hidden;  // keeps `hidden` for backward
    saved.add(hidden);
    outputs.add(y);
    most_saved = std::max(most_saved, saved.count());
    return y;
  }
  Layer layer;
  LiveTensors outputs, saved;
  int64_t most_outputs = 0, most_saved = 0;
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
    return tracked->most_outputs;
  });
  CHECK(live[0] <= most);
}

TEST_CASE("a stage keeps what backward needs of as few micro-batches as its schedule says") {
  const int64_t m = GENERATE(2, 6);
  const auto schedule = GENERATE(kGPipe, kOneFOneB, kInterleaved);
  CAPTURE(m, schedule);
  const auto saved = run_ranks<int64_t>(3, [&](const Rank& self) -> int64_t {
    const auto batch = pipeline_batch(12, 0);
    Tracked tracked(self.rank);
    ddp::PipelineStage pipeline(
        tracked, self.rank, 3, pipeline_loss, options_of(self, schedule, m));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(batch.input);
    pipeline.step(inputs, self.rank == 2 ? batch.target : at::Tensor());
    return tracked->most_saved;
  });
  for (int64_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    const int64_t ahead = schedule == kOneFOneB ? 3 - rank : 2 * (3 - rank) - 1;
    CHECK(saved[static_cast<size_t>(rank)] == (schedule == kGPipe ? m : std::min(m, ahead)));
  }
}

/// Rows of another length in each step; and of other lengths in its micro-batches from the second
/// stage on, as when padding is cut off.
struct TrimmedImpl : LayerImpl {
  explicit TrimmedImpl(int64_t k) : LayerImpl(k), stage(k) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = LayerImpl::forward(x);
    if (stage != 0) return y;
    const bool is_short = x.select(2, 0).mean().item<double>() > 0;
    return is_short ? y.slice(1, 0, y.size(1) - 1) : y;
  }
  int64_t stage;
};
TORCH_MODULE(Trimmed);

TEST_CASE("shapes may change from step to step, and from micro-batch to micro-batch") {
  const auto schedule = GENERATE(kGPipe, kOneFOneB);
  std::atomic<int> lengths{0};  // bits: a micro-batch was cut, another was not
  const auto difference = largest_of_ranks(2, [&](const Rank& self) {
    const auto loss_of = [](const at::Tensor& output, const at::Tensor& target) {
      return (output.mean({1, 2}) - target).pow(2).mean();
    };
    Trimmed own(self.rank), first(0), second(1);
    ddp::PipelineStage pipeline(own, self.rank, 2, loss_of, options_of(self, schedule, 4));
    double largest = 0;
    for (const int64_t length : {3, 7, 2}) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(length));
      const auto options = torch::dtype(torch::kDouble);
      const auto input = torch::randn({4, length, kPipelineWidth}, generator, options);
      const auto target = torch::randn({4}, generator, options);
      for (auto* module : {&own, &first, &second}) (*module)->zero_grad();
      // One process: a row at a time, whose losses have the same mean.
      for (int64_t row = 0; row < 4; ++row) {
        const auto hidden = first->forward(input.narrow(0, row, 1));
        lengths |= hidden.size(1) < length ? 1 : 2;
        (loss_of(second->forward(hidden), target.narrow(0, row, 1)) / 4).backward();
      }
      if (self.rank == 0) pipeline.step({input}, {});
      if (self.rank == 1) pipeline.step({}, target);
      const auto& expected = self.rank == 0 ? first : second;
      largest = std::max(
          largest, largest_difference({expected->fc->weight.grad()}, {own->fc->weight.grad()}));
    }
    return largest;
  });
  CHECK(difference < 1e-12);
  CHECK(lengths == 3);
}

}  // namespace
