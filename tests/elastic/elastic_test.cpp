// Elastic runs with ranks that are threads, and a coordinator in the process.
#include <ddp/elastic.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/batch_stream.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/membership/mirror_group.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "training/elastic/flat_state.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::error_of;
using testing::Rank;
using testing::run_ranks;
using testing::TestCoordinator;

constexpr size_t kSamples = 36;
constexpr size_t kBatch = 3;
constexpr size_t kEpochs = 2;

struct ElasticNetImpl : torch::nn::Module {
  ElasticNetImpl() {
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) {
      p.copy_(torch::sin(torch::arange(p.numel()) * 1.3 + 0.2).view_as(p) * 0.3);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::relu(norm(in(x)))); }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 16))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(16))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(16, 2))};
};
TORCH_MODULE(ElasticNet);

struct Sines : torch::data::datasets::Dataset<Sines> {
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<double>(index);
    return {torch::sin(torch::arange(1.0F, 5.0F) * i), torch::cos(torch::arange(1.0F, 3.0F) * i)};
  }
  std::optional<size_t> size() const override { return kSamples; }
};

/// Where a rank is lost.
enum class Where { Nowhere, BeforeForward, AfterBackward, AfterStep };

struct Failure {
  int rank = -1;
  int64_t step = 0;
  Where where = Where::Nowhere;
};

struct Result {
  std::vector<at::Tensor> state;
  int64_t steps = 0;
  double loss_sum = 0;
  int64_t generation = 0;
  int starts = 0;
};

/// One process's run; throws where it is to be lost.
Result run_once(const Rank& self, const std::string& coordinator, int workers, Failure failure) {
  Elastic run(ElasticOptions()
                  .coordinator(coordinator)
                  .seed(-1)
                  .sets_default_group(false)
                  .group(ProcessGroupOptions()
                             .backend(self.group->getBackend(at::kCPU)->getBackendName())
                             .timeout(std::chrono::seconds(20))));
  ElasticNet net;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions().process_group(run.process_group()).bucket_cap_mb(3e-4));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto group = run.process_group();
  DistributedSampler sampler(
      kSamples, DistributedSamplerOptions().num_replicas(group->getSize()).rank(group->getRank()));
  auto loader = torch::data::make_data_loader(
      Sines().map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions(kBatch).workers(static_cast<size_t>(workers)));
  BatchStream batches(*loader, sampler, kEpochs);
  double loss_sum = 0;
  Result result;
  run.add("model", model).add("optimizer", optimizer).add("batches", batches);
  run.add("loss_sum", loss_sum);
  const auto fail_at = [&](Where where, int64_t step) {
    if (failure.where == where && self.rank == failure.rank && step == failure.step) {
      throw std::runtime_error("this rank is to be lost");
    }
  };
  run.loop([&] {
    const auto step = run.steps();
    auto batch = batches.next();
    if (!batch) return false;
    optimizer.zero_grad();
    fail_at(Where::BeforeForward, step);
    const auto loss = (model->forward(batch->data) - batch->target).square().mean();
    loss.backward();
    fail_at(Where::AfterBackward, step);
    run.step([&] {
      optimizer.step();
      loss_sum += 1;
    });
    fail_at(Where::AfterStep, step);
    auto sum = loss.detach().view({1}).clone();
    all_reduce(sum, c10d::ReduceOp::SUM, run.process_group());
    return true;
  });
  for (const auto& p : net->parameters()) result.state.push_back(p.detach().clone());
  for (const auto& b : net->buffers()) result.state.push_back(b.detach().clone());
  result.steps = run.steps();
  result.loss_sum = loss_sum;
  result.generation = run.generation().number;
  return result;
}

std::vector<Result> run_all(int size, int min_ranks, int workers, Failure failure) {
  const TestCoordinator coordinator(size, min_ranks);
  return run_ranks<Result>(size, [&](const Rank& self) {
    try {
      auto result = run_once(self, coordinator.address(), workers, failure);
      result.starts = 1;
      return result;
    } catch (const std::runtime_error&) {
      if (failure.rank != self.rank) throw;
    }
    auto result = run_once(self, coordinator.address(), workers, {});
    result.starts = 2;
    return result;
  });
}

/// What this process has of the system's.
struct Usage {
  int64_t descriptors = 0;
  int64_t threads = 0;
  int64_t mappings = 0;
  int64_t memory = 0;  // KiB
};

int64_t entries_of(const std::string& folder) {
  const auto begin = std::filesystem::directory_iterator(folder);
  return std::distance(begin, std::filesystem::directory_iterator());
}

Usage usage() {
  Usage now;
  now.descriptors = entries_of("/proc/self/fd");
  now.threads = entries_of("/proc/self/task");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++now.mappings;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> now.memory;
  }
  return now;
}

bool equal_states(const Result& a, const Result& b) {
  for (size_t i = 0; i < a.state.size(); ++i) {
    if (!torch::equal(a.state[i], b.state[i])) return false;
  }
  return a.state.size() == b.state.size();
}

}  // namespace

TEST_CASE("a lost rank that is replaced leaves no trace in the bits", "[ranks][elastic]") {
  const auto where = GENERATE(Where::BeforeForward, Where::AfterBackward, Where::AfterStep);
  const int rank = GENERATE(0, 2);
  const int workers = rank == 0 ? 2 : 0;
  CAPTURE(static_cast<int>(where), rank);
  static const auto quiet = run_all(3, 3, 0, {});
  // In the first step, in the first epoch, and in the first step of the second.
  for (const int64_t step : {int64_t{1}, int64_t{4}}) {
    CAPTURE(step);
    const auto mended = run_all(3, 3, workers, {rank, step, where});
    for (int r = 0; r < 3; ++r) {
      CAPTURE(r);
      CHECK(equal_states(mended[r], quiet[0]));
      CHECK(mended[r].steps == quiet[0].steps);
      CHECK(mended[r].loss_sum == static_cast<double>(quiet[0].steps));
      CHECK(mended[r].generation == 2);
      CHECK(mended[r].starts == (r == rank ? 2 : 1));
    }
  }
  CHECK(quiet[0].steps == 2 * 4);  // 12 samples a rank, in batches of 3
}

TEST_CASE("the others go on without a lost rank, and are equal", "[ranks][elastic]") {
  const TestCoordinator coordinator(3, 2);
  const auto results = run_ranks<Result>(3, [&](const Rank& self) {
    const Failure failure{1, 2, Where::BeforeForward};
    try {
      return run_once(self, coordinator.address(), 0, failure);
    } catch (const std::runtime_error&) {
      if (self.rank != 1) throw;
      return Result();
    }
  });
  CHECK(equal_states(results[0], results[2]));
  CHECK(results[0].generation == 2);
  // 2 steps of 9 samples, and what is left of 36 by 6; then 18 samples a rank by 3.
  CHECK(results[0].steps == 2 + 3 + 6);
}

// CI has 10 changes; DDP_ELASTIC_CHANGES=100: more.
TEST_CASE("changes leave no descriptor, thread or mapping", "[ranks][elastic]") {
  const char* given = std::getenv("DDP_ELASTIC_CHANGES");
  const int changes = given == nullptr ? 10 : std::atoi(given);
  const TestCoordinator coordinator(2, 2);
  std::vector<Usage> usages;
  std::atomic<bool> ends{false};
  run_ranks<int>(
      2,
      [&](const Rank& self) {
        // Rank 1 is lost and comes back in each change; rank 0 stays.
        for (bool is_lost = true; is_lost && !ends;) {
          is_lost = false;
          Elastic run(ElasticOptions()
                          .coordinator(coordinator.address())
                          .seed(-1)
                          .sets_default_group(false)
                          .group(ProcessGroupOptions().timeout(std::chrono::seconds(20))));
          ElasticNet net;
          DistributedDataParallel model(
              net, DistributedDataParallelOptions().process_group(run.process_group()));
          torch::optim::SGD optimizer(net->parameters(), 0.1);
          run.add("model", model).add("optimizer", optimizer);
          run.on_change([&](const Generation& now) {
            if (self.rank == 0 && now.number > 3) usages.push_back(usage());
          });
          try {
            run.loop([&] {
              const auto number = run.generation().number;
              if (number > changes && run.steps() % 4 == 0) return false;
              optimizer.zero_grad();
              model->forward(torch::ones({2, 4})).sum().backward();
              run.step(optimizer);
              all_reduce(torch::ones({1}), c10d::ReduceOp::SUM, run.process_group());
              // Both have taken the step: one that is lost three times would end the job.
              if (self.rank == 1 && number <= changes) throw std::runtime_error("lost");
              return true;
            });
            ends = true;
          } catch (const std::runtime_error&) {
            is_lost = true;
          }
        }
        return 0;
      },
      {std::chrono::seconds(20), std::chrono::seconds(20 + 2 * changes)});
  const auto first = usages.at(usages.size() / 2);
  const auto last = usages.back();
  CAPTURE(first.memory, last.memory);
  CHECK(usages.size() >= static_cast<size_t>(changes) - 3);
  CHECK(last.descriptors <= first.descriptors + 2);
  CHECK(last.threads <= first.threads + 2);
  CHECK(last.mappings <= first.mappings + 8);
  CHECK(last.memory <= first.memory + 10 * 1024);
}

TEST_CASE("what Elastic refuses", "[ranks][elastic][errors]") {
  const auto coordinator = [](int ranks) {
    return std::make_shared<TestCoordinator>(ranks, ranks);
  };
  const auto options = [](const TestCoordinator& one) {
    return ElasticOptions()
        .coordinator(one.address())
        .seed(-1)
        .sets_default_group(false)
        .group(ProcessGroupOptions().timeout(std::chrono::seconds(20)));
  };
  SECTION("parts and calls") {
    const auto one = coordinator(1);
    Elastic run(options(*one));
    int64_t number = 0;
    run.add("number", number);
    CHECK_THAT(
        error_of([&] { run.add("number", number); }),
        ContainsText("expected a new name, got \"number\" again"));
    ElasticNet net;
    torch::optim::LBFGS lbfgs(net->parameters());
    CHECK_THAT(error_of([&] { run.add("lbfgs", lbfgs); }), ContainsText("got LBFGS. Use another"));
    DistributedDataParallel model(
        net, DistributedDataParallelOptions().process_group(run.process_group()));
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(model, torch::optim::AdamOptions());
    CHECK_THAT(
        error_of([&] { run.add("zero", zero); }),
        ContainsText("whose part of a lost rank no other rank has"));
    CHECK_THAT(error_of([&] { run.step([] {}); }), ContainsText("got a call outside of a turn"));
    CHECK_THAT(
        error_of([&] {
          run.loop([&] {
            run.step([&] { ++number; });
            run.step([&] { ++number; });
            return true;
          });
        }),
        ContainsText("expected one step in a turn, got a second one"));
    CHECK(number == 1);
  }
  SECTION("other parts on another rank, and parts that differ") {
    const bool names = GENERATE(true, false);
    const auto two = coordinator(2);
    const auto errors = testing::errors_of_ranks(2, [&](const Rank& self) {
      Elastic run(options(*two));
      int64_t number = names ? 0 : self.rank;
      run.add(names && self.rank == 1 ? "another" : "number", number);
      run.loop([] { return false; });
    });
    for (const auto& error : errors) {
      CHECK_THAT(
          error,
          ContainsText(
              names ? "expected the same parts on every rank, got \""
                    : "expected every part to be equal on all ranks, but \"number\" differs"));
    }
  }
  SECTION("addresses and backends") {
    CHECK_THAT(
        error_of([] { Elastic run(ElasticOptions().coordinator("host")); }),
        ContainsText("ElasticOptions::coordinator(): expected HOST:PORT/TOKEN, got 'host'"));
    CHECK_THAT(
        error_of([] {
          Elastic run(ElasticOptions().group(ProcessGroupOptions().backend("cpu:gloo,cuda:nccl")));
        }),
        ContainsText("expected backend shm or gloo, got \"cpu:gloo,cuda:nccl\""));
  }
}

TEST_CASE("a mirror answers as the process itself would", "[elastic]") {
  const auto group = make_mirror_group(2, 4, std::chrono::seconds(1));
  const auto value = [] { return torch::full({2}, 3.0); };
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::SUM, group), torch::full({2}, 12.0)));
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::AVG, group), value()));
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::MAX, group), value()));
  auto tensor = value();
  broadcast(tensor, 0, group);
  CHECK(torch::equal(tensor, value()));
  std::vector<at::Tensor> all(4);
  for (auto& one : all) one = torch::zeros({2});
  all_gather(all, value(), group);
  for (const auto& one : all) CHECK(torch::equal(one, value()));
  CHECK(all_gather_strings("text", group) == std::vector<std::string>(4, "text"));
  CHECK_THAT(
      error_of([&] { send(tensor, 1, 0, group); }),
      ContainsText("send: expected a group of ranks that train"));
  CHECK_THAT(
      error_of([&] {
        new_group({0, 1}, group);
      }),
      ContainsText("new_group: expected the group of ranks that train"));
  end_mirror_group(group);
  CHECK_THAT(
      error_of([&] { all_reduce(tensor, c10d::ReduceOp::SUM, group); }),
      ContainsText("This group ended. Ask ddp::default_group() each time"));
  CHECK_THROWS_AS(all_reduce(tensor, c10d::ReduceOp::SUM, group), RankLost);
}

TEST_CASE("a state as a text and tensors, and back", "[elastic]") {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(torch::arange(6).view({2, 3}));
  list.push_back(std::string("two\nlines"));
  list.push_back(c10::IValue());
  dict.insert(c10::IValue("list"), list);
  dict.insert(c10::IValue(int64_t{7}), c10::ivalue::Tuple::create({0.1, true, false}));
  dict.insert(c10::IValue("empty"), torch::zeros({0, 3}, torch::kBFloat16));
  const auto text = elastic::packed_state(dict);
  const auto copy = elastic::unpacked_state(text);
  CHECK(elastic::packed_state(copy) == text);
  CHECK(elastic::hash_of(copy) == elastic::hash_of(dict));
  CHECK(elastic::hash_of(elastic::copied(dict)) == elastic::hash_of(dict));
  list.get(0).toTensor()[1][2] = 8;
  CHECK(elastic::hash_of(copy) != elastic::hash_of(dict));
}

}  // namespace ddp
