// Elastic runs with ranks that are threads, and a coordinator in the process.
#include <ddp/elastic.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/batch_stream.h>
#include <ddp/checkpointer.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/gradients.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "elastic/sines.h"
#include "elastic/test_coordinator.h"
#include "elastic/usage.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

/// Where a rank is lost, or leaves; or where the others wait for one that comes back.
enum class Where { Nowhere, BeforeForward, AfterBackward, InStep, AfterStep, Leaves, Joins };

/// What is the same in all processes of a run.
struct Setup {
  int workers = 0;
  int zero_stage = 0;            // of a ZeroRedundancyOptimizer, with snapshots every 3 steps
  std::string backend = "";      // empty: the ranks'
  bool swallows = false;         // the turn catches all exceptions
  bool streams = false;          // batches of a ShardedStream, and not of a sampler
  std::string checkpoints = "";  // folder, with one every 3 steps; empty: none
};

struct Failure {
  int rank = -1;
  int64_t step = 0;
  Where where = Where::Nowhere;
  std::vector<int> slots = {};         // in place of a rank: that of a thread is by chance
  std::atomic<int>* others = nullptr;  // how many are still to come to the same place
};

struct Result {
  std::vector<at::Tensor> state;
  int64_t steps = 0;
  double loss_sum = 0;
  int64_t own_steps = 0;  // of this process
  int64_t generation = 0;
  int64_t repeated = 0;
  int starts = 0;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    DistributedDataParallel<ElasticNet>& model, int zero_stage) {
  // What is 0 but for rounding, the gradients of a bias before a norm, is to change next to
  // nothing.
  const auto adamw = torch::optim::AdamWOptions(1e-2).eps(1e-3);
  if (zero_stage == 0) return std::make_unique<torch::optim::AdamW>(model->parameters(), adamw);
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
      model, adamw, ZeroOptions().stage(zero_stage));
}

std::string backend_of(const Rank& self) {
  return self.group->getBackend(at::kCPU)->getBackendName();
}

/// Each stage over the ranks' backend, and stage 2 over shared memory, too.
Setup with_sharding(int number) {
  Setup setup;
  setup.zero_stage = std::min(number, 2);
  if (number == 3) setup.backend = "shm";
  return setup;
}

/// One process's run; throws where it is to be lost.
Result run_once(
    const Rank& self, const std::string& coordinator, const Setup& setup, Failure failure) {
  Elastic run(
      options_of_thread(
          coordinator, ProcessGroupOptions()
                           .backend(setup.backend.empty() ? backend_of(self) : setup.backend)
                           .timeout(std::chrono::seconds(20)))
          .snapshot_every(3));
  ElasticNet net;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions().process_group(run.process_group()).bucket_cap_mb(3e-4));
  const auto optimizer = make_optimizer(model, setup.zero_stage);
  const auto group = run.process_group();
  DistributedSampler sampler(
      kSamples, DistributedSamplerOptions().num_replicas(group->getSize()).rank(group->getRank()));
  auto loader = torch::data::make_data_loader(
      Sines().map(torch::data::transforms::Stack<>()), sampler,
      torch::data::DataLoaderOptions(kBatch).workers(static_cast<size_t>(setup.workers)));
  BatchStream batches(*loader, sampler, kEpochs);
  auto stream = batches_of_stream(group, setup.workers);
  BatchStream streamed(stream, kEpochs);
  double loss_sum = 0;
  Result result;
  run.add("model", model).add("optimizer", *optimizer);
  setup.streams ? run.add("batches", streamed) : run.add("batches", batches);
  run.add("loss_sum", loss_sum).add_per_rank("own_steps", result.own_steps);
  run.on_change([&](const ElasticGeneration& now) { result.repeated += now.repeated; });
  std::optional<Checkpointer> checkpointer;
  if (!setup.checkpoints.empty()) {
    checkpointer.emplace(
        setup.checkpoints,
        CheckpointerOptions().every_steps(3).background(false).process_group(run.process_group()));
    checkpointer->add("model", model).add("optimizer", *optimizer).add("batches", batches);
    checkpointer->add("loss_sum", loss_sum);
    run.checkpoints(*checkpointer);
  }
  const auto fail_at = [&](Where where, int64_t step) {
    const auto& slots = failure.slots;
    const int slot = run.generation().slot;
    const bool is_meant = slots.empty()
                              ? self.rank == failure.rank
                              : std::find(slots.begin(), slots.end(), slot) != slots.end();
    if (failure.where == where && is_meant && step == failure.step) {
      if (failure.others != nullptr) {
        --*failure.others;
        while (*failure.others > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      throw std::runtime_error("this rank is to be lost");
    }
  };
  bool has_arrived = false;
  const auto waits_for_another = [&] {
    const bool waits = failure.where == Where::Joins && run.steps() == failure.step &&
                       run.generation().size < self.size;
    if (waits && !std::exchange(has_arrived, true)) --*failure.others;
    return waits;
  };
  const auto turn = [&] {
    const auto step = run.steps();
    if (waits_for_another()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return true;
    }
    auto batch = setup.streams ? streamed.next() : batches.next();
    if (!batch) return false;
    zero_grad(*optimizer);
    if (failure.where == Where::Leaves && step == failure.step && self.rank == failure.rank) {
      run.leave();
    }
    fail_at(Where::BeforeForward, step);
    const auto loss = (model->forward(batch->data) - batch->target).square().mean();
    loss.backward();
    fail_at(Where::AfterBackward, step);
    run.step([&] {
      fail_at(Where::InStep, step);
      optimizer->step();
      loss_sum += 1;
      ++result.own_steps;
    });
    fail_at(Where::AfterStep, step);
    auto sum = loss.detach().view({1}).clone();
    all_reduce(sum, c10d::ReduceOp::SUM, run.process_group());
    return true;
  };
  run.loop([&] {
    if (!setup.swallows) return turn();
    try {
      return turn();
    } catch (const RankLost&) {
      return true;  // as a program that catches too much
    }
  });
  result.state = state_of(*net);
  result.steps = run.steps();
  result.loss_sum = loss_sum;
  result.generation = run.generation().number;
  return result;
}

std::vector<Result> run_all(int size, int min_ranks, const Setup& setup, Failure failure) {
  const TestCoordinator coordinator(size, min_ranks);
  return run_ranks<Result>(size, [&](const Rank& self) {
    try {
      auto result = run_once(self, coordinator.address(), setup, failure);
      result.starts = 1;
      return result;
    } catch (const std::runtime_error&) {
      if (failure.slots.empty() && failure.rank != self.rank) throw;
    }
    auto result = run_once(self, coordinator.address(), setup, {});
    result.starts = 2;
    return result;
  });
}

/// Whether a run has ended as one with a whole optimizer. With stage 2 the gradients lie in other
/// buckets, in which Gloo adds up in another order; shared memory adds up in one order.
bool equals_whole(const Result& sharded, const Result& whole, const Setup& setup) {
  return largest_difference(sharded.state, whole.state) <=
         (setup.zero_stage == 2 && setup.backend.empty() ? 1e-5 : 0);
}

}  // namespace

TEST_CASE("a lost rank that is replaced leaves no trace in the bits", "[ranks][elastic]") {
  const auto where = GENERATE(Where::BeforeForward, Where::AfterBackward, Where::AfterStep);
  const int rank = GENERATE(0, 2);
  Setup setup;
  setup.workers = rank == 0 ? 2 : 0;
  setup.swallows = rank == 2;
  CAPTURE(static_cast<int>(where), rank);
  static const auto quiet = run_all(3, 3, {}, {});
  // In the first step, in the first epoch, and in the first step of the second.
  for (const int64_t step : {int64_t{1}, int64_t{4}}) {
    CAPTURE(step);
    const auto mended = run_all(3, 3, setup, {rank, step, where});
    for (int r = 0; r < 3; ++r) {
      CAPTURE(r);
      CHECK(all_equal(mended[r].state, quiet[0].state));
      CHECK(mended[r].steps == quiet[0].steps);
      CHECK(mended[r].loss_sum == static_cast<double>(quiet[0].steps));
      // Each rank's own: a new process has it as constructed. Where the others have taken the
      // step, a rank that has not takes their state.
      const auto missed = quiet[0].steps - mended[r].own_steps - (r == rank ? step : 0);
      CHECK(missed >= 0);
      CHECK(missed <= (where == Where::BeforeForward ? 0 : 1));
      CHECK(mended[r].generation == 2);
      CHECK(mended[r].starts == (r == rank ? 2 : 1));
    }
  }
  CHECK(quiet[0].steps == 2 * 4);  // 12 samples a rank, in batches of 3
}

TEST_CASE("batches of a stream follow the ranks, too", "[ranks][elastic]") {
  Setup setup;
  setup.streams = true;
  setup.workers = 2;
  const auto quiet = run_all(3, 3, setup, {});
  const auto mended = run_all(3, 3, setup, {1, 2, Where::AfterBackward});
  for (const auto& result : mended) CHECK(all_equal(result.state, quiet[0].state));
  CHECK(mended[0].steps == 2 * 4);

  const TestCoordinator coordinator(3, 2);
  const auto fewer = run_ranks<Result>(3, [&](const Rank& self) {
    try {
      return run_once(self, coordinator.address(), setup, {1, 2, Where::BeforeForward});
    } catch (const std::runtime_error&) {
      if (self.rank != 1) throw;
      return Result();
    }
  });
  CHECK(all_equal(fewer[0].state, fewer[2].state));
  // 2 steps of 9 samples, what is left of 36 by 6, then 18 samples a rank by 3.
  CHECK(fewer[0].steps == 2 + 3 + 6);
}

TEST_CASE("the others go on without a lost rank, and are equal", "[ranks][elastic]") {
  const auto setup = with_sharding(GENERATE(0, 1, 2, 3));
  CAPTURE(setup.zero_stage, setup.backend);
  const auto train = [](const Setup& one, int64_t lost_at) {
    const TestCoordinator coordinator(3, 2);
    return run_ranks<Result>(3, [&](const Rank& self) {
      try {
        return run_once(self, coordinator.address(), one, {1, lost_at, Where::BeforeForward});
      } catch (const std::runtime_error&) {
        if (self.rank != 1) throw;
        return Result();
      }
    });
  };
  const auto results = train(setup, 2);
  CHECK(all_equal(results[0].state, results[2].state));
  CHECK(results[0].generation == 2);
  // 2 steps of 9 samples, or the first, after which there is a snapshot; what is left of 36 by 6;
  // then 18 samples a rank by 3.
  CHECK(results[0].steps == (setup.zero_stage > 0 ? 1 + 5 + 6 : 2 + 3 + 6));
  if (setup.zero_stage == 0) return;
  // All go back to the snapshot after the first step: what follows is as with a whole optimizer
  // whose ranks lose the same one there.
  Setup whole_setup;
  whole_setup.backend = setup.backend;
  const auto whole = train(whole_setup, 1);
  CHECK(whole[0].steps == results[0].steps);
  CHECK(equals_whole(results[0], whole[0], setup));
}

TEST_CASE("a rank that comes back later trains on with the others", "[ranks][elastic]") {
  // It is lost after a step; the others take two more, and wait for it.
  const auto train = [](const Setup& setup) {
    const TestCoordinator coordinator(3, 2);
    std::atomic<int> to_come{2};
    return run_ranks<Result>(3, [&](const Rank& self) {
      if (self.rank < 2) {
        Failure joins{-1, 3, Where::Joins};
        joins.others = &to_come;
        return run_once(self, coordinator.address(), setup, joins);
      }
      try {
        return run_once(self, coordinator.address(), setup, {2, 1, Where::BeforeForward});
      } catch (const std::runtime_error&) {
        while (to_come > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return run_once(self, coordinator.address(), setup, {});
    });
  };
  const auto setup = with_sharding(GENERATE(0, 1, 2, 3));
  CAPTURE(setup.zero_stage, setup.backend);
  Setup whole_setup;
  whole_setup.backend = setup.backend;
  const auto whole = train(whole_setup);
  const auto results = setup.zero_stage > 0 ? train(setup) : whole;
  for (const auto& result : results) {
    CHECK(all_equal(result.state, results[0].state));
    CHECK(result.generation == 3);
    // A step of 9 samples, 2 of 6, what is left of 36 by 9, then 12 samples a rank by 3.
    CHECK(result.steps == 1 + 2 + 2 + 4);
    CHECK(result.loss_sum == static_cast<double>(result.steps));
  }
  CHECK(results[2].own_steps == 2 + 4);
  CHECK(equals_whole(results[0], whole[0], setup));
}

TEST_CASE("a lost part of a sharded optimizer comes from its neighbour", "[ranks][elastic]") {
  struct Loss {
    Failure failure;
    int64_t snapshot;  // the step that all go back to
  };
  const auto setup = with_sharding(GENERATE(1, 2, 3));
  CAPTURE(setup.zero_stage, setup.backend);
  Setup whole_setup;
  whole_setup.backend = setup.backend;
  const auto whole = run_all(3, 3, whole_setup, {});
  const auto quiet = run_all(3, 3, setup, {});
  CHECK(equals_whole(quiet[0], whole[0], setup));
  for (const auto& loss :
       {Loss{{0, 1, Where::BeforeForward}, 1}, Loss{{2, 3, Where::InStep}, 1},
        Loss{{1, 5, Where::AfterStep}, 4}, Loss{{2, 7, Where::AfterBackward}, 7}}) {
    CAPTURE(loss.failure.rank, loss.failure.step);
    const auto mended = run_all(3, 3, setup, loss.failure);
    for (int r = 0; r < 3; ++r) {
      CAPTURE(r);
      CHECK(all_equal(mended[r].state, quiet[0].state));
      CHECK(mended[r].steps == quiet[0].steps);
      CHECK(mended[r].loss_sum == static_cast<double>(quiet[0].steps));
      const bool is_new = r == loss.failure.rank;
      CHECK(mended[r].own_steps == quiet[0].steps - (is_new ? loss.snapshot : 0));
      CHECK(mended[r].starts == (is_new ? 2 : 1));
      CHECK(mended[r].repeated <= (is_new ? 0 : 3));
    }
  }
}

TEST_CASE("a rank that leaves costs no step", "[ranks][elastic]") {
  const auto setup = with_sharding(GENERATE(0, 1, 2));
  CAPTURE(setup.zero_stage);
  const int leaver = GENERATE(0, 1);
  const auto results = run_all(3, 2, setup, {leaver, 2, Where::Leaves});
  const auto& one = results[leaver == 0 ? 1 : 0];
  CHECK(all_equal(one.state, results[2].state));
  CHECK(one.generation == 2);
  if (setup.zero_stage > 0) CHECK(one.steps == one.own_steps);
  // Some steps of 9 samples, then of 6; the ranks pause in the turn that learns of it.
  const auto left = static_cast<int64_t>(kSamples) - 9 * results[leaver].steps;
  CHECK(one.steps == results[leaver].steps + ((left + 1) / 2 + 2) / 3 + 6);
  CHECK(results[leaver].generation == 1);
  CHECK(results[leaver].steps >= 2);
  for (const auto& result : results) CHECK(result.repeated <= (setup.zero_stage > 0 ? 0 : 1));
}

TEST_CASE("a part that is lost with its copy ends the job", "[ranks][elastic][errors]") {
  const TestCoordinator coordinator(4, 1);
  Setup setup;
  setup.zero_stage = 2;
  std::atomic<int> to_come{2};
  Failure neighbours;
  neighbours.slots = {1, 2};
  neighbours.step = 1;
  neighbours.where = Where::BeforeForward;
  neighbours.others = &to_come;
  const auto errors = errors_of_ranks(
      4, [&](const Rank& self) { run_once(self, coordinator.address(), setup, neighbours); });
  int lost = 0, without_state = 0;
  for (const auto& error : errors) {
    lost += error.find("this rank is to be lost") != error.npos ? 1 : 0;
    without_state += error.find("expected each rank's part of a Zero") != error.npos ? 1 : 0;
  }
  CAPTURE(errors);
  CHECK(lost == 2);
  CHECK(without_state == 2);
}

TEST_CASE("a part that is lost with its copy comes from the last checkpoint", "[ranks][elastic]") {
  // Slot 2 keeps the copy of slot 1's part. There is a checkpoint of step 3, and a snapshot of 4.
  const auto where = GENERATE(Where::BeforeForward, Where::AfterBackward);
  CAPTURE(static_cast<int>(where));
  const TemporaryFolder folder;
  Setup setup;
  setup.zero_stage = 2;
  static const auto quiet = run_all(4, 4, setup, {});
  std::atomic<int> to_come{2};
  Failure neighbours;
  neighbours.slots = {1, 2};
  neighbours.step = 4;
  neighbours.where = where;
  neighbours.others = &to_come;
  setup.checkpoints = folder.path();
  const auto mended = run_all(4, 4, setup, neighbours);
  int replaced = 0;
  for (const auto& result : mended) {
    CAPTURE(result.starts);
    CHECK(all_equal(result.state, quiet[0].state));
    CHECK(result.steps == quiet[0].steps);
    CHECK(result.loss_sum == static_cast<double>(quiet[0].steps));
    // From step 3 on again; a new process, after it.
    const bool is_new = result.starts == 2;
    const auto more = result.own_steps - quiet[0].steps;
    CHECK(more >= (is_new ? -3 : 1));
    CHECK(more <= (is_new ? -3 : where == Where::BeforeForward ? 1 : 2));
    CHECK(result.repeated == (is_new ? 0 : 2));
    replaced += is_new ? 1 : 0;
  }
  CHECK(replaced == 2);
  CHECK(quiet[0].steps == 2 * 3);
}

// CI has 10 changes; DDP_ELASTIC_CHANGES=100: more.
TEST_CASE("changes leave no descriptor, thread or mapping", "[ranks][elastic]") {
  const char* given = std::getenv("DDP_ELASTIC_CHANGES");
  const int changes = given == nullptr ? 10 : std::atoi(given);
  const TestCoordinator coordinator(2, 2);
  std::vector<Usage> usages;
  std::atomic<bool> ends{false};
  run_ranks<int>(
      2, {std::chrono::seconds(20), std::chrono::seconds(20 + 2 * changes)}, [&](const Rank& self) {
        // Rank 1 is lost and comes back in each change; rank 0 stays.
        for (bool is_lost = true; is_lost && !ends;) {
          is_lost = false;
          Elastic run(options_of_thread(
              coordinator.address(), ProcessGroupOptions().timeout(std::chrono::seconds(20))));
          ElasticNet net;
          DistributedDataParallel model(
              net, DistributedDataParallelOptions().process_group(run.process_group()));
          torch::optim::SGD optimizer(net->parameters(), 0.1);
          run.add("model", model).add("optimizer", optimizer);
          run.on_change([&](const ElasticGeneration& now) {
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
      });
  const auto first = usages.at(usages.size() / 2);
  const auto last = usages.back();
  CAPTURE(first.memory, last.memory);
  CHECK(usages.size() >= static_cast<size_t>(changes) - 3);
  CHECK(last.descriptors <= first.descriptors + 2);
  CHECK(last.threads <= first.threads + 2);
  CHECK(last.mappings <= first.mappings + 8);
  CHECK(last.memory <= first.memory + 10 * 1024);
}

}  // namespace ddp
