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

}  // namespace
