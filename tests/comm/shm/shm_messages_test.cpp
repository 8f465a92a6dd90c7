// Messages, and the other calls that shared memory does not carry, in groups that are made of a
// group over shared memory.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/c10d_names.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::shm_messages_test {
namespace {

using testing::error_of;
using testing::errors_of_ranks;
using testing::Rank;
using testing::RanksOptions;
using testing::run_ranks;
using testing::timed_error_of;
using testing::TimedError;
using namespace std::chrono_literals;

// Numbers of elements of a message that fits in one packet, and of one that does not.
constexpr int64_t kShort = 10;
constexpr int64_t kLong = 50000;

RanksOptions over_shm(std::chrono::milliseconds timeout = 20s) {
  RanksOptions options;
  options.backend = "shm";
  options.collective_timeout = timeout;
  return options;
}

/// c10d's own calls, which no monitor watches.
WorkPtr send_one(const ProcessGroup& group, int dst, const at::Tensor& tensor, int tag = 0) {
  std::vector<at::Tensor> tensors{tensor};
  return group->send(tensors, dst, tag);
}
WorkPtr receive_one(const ProcessGroup& group, int src, const at::Tensor& tensor, int tag = 0) {
  std::vector<at::Tensor> tensors{tensor};
  return group->recv(tensors, src, tag);
}

/// Sends a message from rank 0 to rank 1 of the world.
void check_world(const Rank& self) {
  auto tensor = at::full({kLong}, self.rank == 0 ? 3 : 0);
  if (self.rank == 0) send_one(self.group, 1, tensor, 9)->wait();
  if (self.rank == 1) receive_one(self.group, 0, tensor, 9)->wait();
  TORCH_CHECK(self.rank > 1 || tensor.eq(3).all().item<bool>(), "the world has lost a message");
}

}  // namespace

TEST_CASE("messages of a group meet those of no other group", "[shm][ranks]") {
  const int64_t numel = GENERATE(0, kShort, kLong);
  CAPTURE(numel);
  const auto errors = errors_of_ranks(
      3,
      [&](const Rank& self) {
        // The numbers of ranks 1 and 2 differ between the groups.
        const std::vector<ProcessGroup> groups{
            self.group, new_group({0, 1, 2}, self.group), new_group({1, 2}, self.group),
            new_group({2, 1}, self.group)};
        const std::vector<int> firsts{1, 1, 0, 0};
        std::vector<at::Tensor> tensors;
        std::vector<WorkPtr> works;
        if (self.rank == 0) return;
        for (size_t i = 0; i < groups.size(); ++i) {
          for (const int tag : {0, 70000}) {
            // Rank 2 receives in the opposite order.
            const size_t group = self.rank == 1 ? i : groups.size() - 1 - i;
            const int value = static_cast<int>(group) + tag;
            tensors.push_back(at::full({numel}, self.rank == 1 ? value : -1));
            works.push_back(
                self.rank == 1 ? send_one(groups[group], firsts[group] + 1, tensors.back(), tag)
                               : receive_one(groups[group], firsts[group], tensors.back(), tag));
          }
        }
        for (const auto& work : works) work->wait();
        for (size_t i = 0; self.rank == 2 && i < tensors.size(); ++i) {
          const int value = static_cast<int>(groups.size() - 1 - i / 2) + (i % 2 == 0 ? 0 : 70000);
          TORCH_CHECK(tensors[i].eq(value).all().item<bool>(), "message ", i);
        }
      },
      over_shm());
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a receive from any source of a group tells its number there", "[shm][ranks]") {
  const int64_t numel = GENERATE(kShort, kLong);
  CAPTURE(numel);
  const auto sources = run_ranks<std::vector<int>>(
      3,
      [&](const Rank& self) {
        const auto pair = new_group({1, 2}, self.group);
        std::vector<int> sources;
        if (self.rank == 0) send_one(self.group, 2, at::full({numel}, 7))->wait();
        if (self.rank == 1) ddp::send(at::full({numel}, 8), 1, 0, pair);
        if (self.rank == 2) {
          for (const auto& group : {pair, self.group}) {
            std::vector<at::Tensor> tensors{at::zeros({numel}, at::kLong)};
            const auto work = group->recvAnysource(tensors, 0);
            TORCH_CHECK(work->wait());
            sources.push_back(work->sourceRank());
            sources.push_back(tensors[0][0].item<int>());
          }
        }
        return sources;
      },
      over_shm());
  CHECK(sources[2] == std::vector<int>{0, 8, 0, 7});
}

TEST_CASE("each rank of a group receives while it sends", "[shm][ranks]") {
  const auto right = run_ranks<int>(
      3,
      [](const Rank& self) {
        const auto group = new_group({0, 1, 2}, self.group);
        auto received = at::full({1 << 20}, -1);
        const auto work = ddp::recv_async(received, (self.rank + 2) % 3, 0, group);
        ddp::send(at::full({1 << 20}, self.rank), (self.rank + 1) % 3, 0, group);
        work->wait();
        return received.eq((self.rank + 2) % 3).all().item<bool>() ? 1 : 0;
      },
      over_shm());
  CHECK(right == std::vector<int>(3, 1));
}

TEST_CASE("a message that a group refuses ends that group alone", "[shm][ranks][errors]") {
  const int64_t numel = GENERATE(kShort, kLong);
  const bool any_source = GENERATE(false, true);
  CAPTURE(numel, any_source);
  const auto results = run_ranks<std::vector<std::string>>(
      3,
      [&](const Rank& self) {
        const auto pair = new_group({1, 2}, self.group);
        std::vector<std::string> errors;
        std::vector<at::Tensor> tensors{at::full({numel + self.rank}, self.rank)};
        const auto call = [&] {
          const auto work = self.rank == 1 ? pair->send(tensors, 1, 0)
                            : any_source   ? pair->recvAnysource(tensors, 0)
                                           : pair->recv(tensors, 0, 0);
          work->wait();
        };
        if (pair) errors.push_back(error_of(call));
        if (self.rank == 2) {
          errors.push_back(error_of(call));
          TORCH_CHECK(tensors[0].eq(2).all().item<bool>(), "written to");
        }
        check_world(self);
        self.wait_until_others_end();  // its end would close connections
        return errors;
      },
      over_shm());
  CHECK(results[1][0].empty() == (numel == kShort));
  if (numel == kLong) CHECK_THAT(results[1][0], ContainsText("recv: expected a message of "));
  CHECK_THAT(
      results[2][0], ContainsText("recv: expected a message of ") &&
                         ContainsText("from rank 0 with tag 0, got ") &&
                         ContainsText("on rank 1 of 2"));
  CHECK_THAT(results[2][1], ContainsText("recv: expected a message of "));
}

TEST_CASE("a rank that leaves a group ends its members' receives", "[shm][ranks][errors]") {
  const bool aborts = GENERATE(false, true);
  CAPTURE(aborts);
  const auto results = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        auto pair = new_group({0, 1}, self.group);
        TimedError seen;
        if (self.rank == 1) {
          if (aborts) pair->abort();
          pair.reset();
        } else {
          auto tensor = at::zeros({kShort});
          seen = timed_error_of([&] { receive_one(pair, 1, tensor)->wait(); });
        }
        check_world(self);
        return seen;
      },
      over_shm());
  CHECK(results[0].seconds < 3);
  CHECK_THAT(
      results[0].error, ContainsText("rank 1 (process ") &&
                            ContainsText(aborts ? "has aborted" : "has left the process group"));
}

TEST_CASE("a message that was sent before its rank left arrives", "[shm][ranks]") {
  const auto errors = errors_of_ranks(
      2,
      [](const Rank& self) {
        auto pair = new_group({0, 1}, self.group);
        auto tensor = at::full({kLong}, self.rank);
        if (self.rank == 1) {
          send_one(pair, 0, tensor)->wait();
        } else {
          const auto work = receive_one(pair, 1, tensor);
          TORCH_CHECK(work->wait());
          TORCH_CHECK(tensor.eq(1).all().item<bool>());
        }
      },
      over_shm());
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a group that is aborted ends its own receives alone", "[shm][ranks][errors]") {
  const auto results = run_ranks<std::vector<TimedError>>(
      2,
      [](const Rank& self) {
        const auto pair = new_group({0, 1}, self.group);
        auto tensor = at::zeros({kShort});
        std::vector<TimedError> seen;
        if (self.rank == 0) {
          const auto work = receive_one(pair, 1, tensor);
          std::thread aborting([&] {
            std::this_thread::sleep_for(200ms);
            pair->abort();
          });
          seen.push_back(timed_error_of([&] { work->wait(); }));
          aborting.join();
          seen.push_back(timed_error_of([&] { receive_one(pair, 1, tensor); }));
        }
        check_world(self);
        return seen;
      },
      over_shm());
  for (const auto& seen : results[0]) {
    CHECK(seen.seconds < 1);
    CHECK_THAT(seen.error, ContainsText("the process group was aborted"));
  }
}

TEST_CASE("a receive that times out leaves the world's connections", "[shm][ranks][errors]") {
  const bool waits_shorter = GENERATE(false, true);
  CAPTURE(waits_shorter);
  const auto results = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        const auto pair = new_group({0, 1}, self.group);
        auto tensor = at::full({kShort}, self.rank);
        TimedError seen;
        WorkPtr work;
        if (self.rank == 0) {
          work = receive_one(pair, 1, tensor);
          seen = timed_error_of([&] { waits_shorter ? work->wait(100ms) : work->wait(); });
          self.store->set("rank 0 has waited", std::vector<uint8_t>{1});
        }
        self.store->wait({"rank 0 has waited"}, 10s);
        check_world(self);
        if (waits_shorter) {  // it can still arrive
          if (self.rank == 1) send_one(pair, 0, tensor)->wait();
          if (self.rank == 0) TORCH_CHECK(work->wait() && tensor.eq(1).all().item<bool>());
        }
        return seen;
      },
      over_shm(2s));
  CHECK_THAT(results[0].error, ContainsText("imed out"));
  CHECK(results[0].seconds < (waits_shorter ? 1 : 3));
}

TEST_CASE("a group connects Gloo for the calls that need it", "[shm][ranks]") {
  const auto errors = errors_of_ranks(
      3,
      [](const Rank& self) {
        const auto group = new_group({0, 1, 2}, self.group);
        const auto backend = group->getBackend(at::kCPU);
        for (int i = 0; i < 2; ++i) {
          std::vector<at::Tensor> two{at::ones(10), at::ones(10)};
          const auto work = backend->allreduce(two);
          barrier(group);
          TORCH_CHECK(work->isCompleted(), "a barrier completes before the call that Gloo carries");
          TORCH_CHECK(two[0].eq(6).all().item<bool>());
        }
        group->monitoredBarrier(c10d::BarrierOptions());
        const auto indices = at::full({1, 1}, self.rank);
        std::vector<at::Tensor> sparse{at::sparse_coo_tensor(indices, at::ones({1}), {3})};
        backend->allreduce_sparse(sparse, {})->wait();
        TORCH_CHECK(sparse[0].to_dense().eq(1).all().item<bool>());
      },
      over_shm());
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("no rank waits to connect Gloo with one that will not come", "[shm][ranks][errors]") {
  // Rank 1 has left, or makes a call that shared memory carries.
  const bool leaves = GENERATE(true, false);
  CAPTURE(leaves);
  const auto results = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        auto pair = new_group({0, 1}, self.group);
        const auto call = [&](std::vector<at::Tensor> tensors) {
          return timed_error_of([&] { pair->getBackend(at::kCPU)->allreduce(tensors)->wait(); });
        };
        TimedError seen;
        if (self.rank == 0) seen = call({at::ones(10), at::ones(10)});
        if (self.rank == 1 && !leaves) seen = call({at::ones(10)});
        if (self.rank == 1 && leaves) pair.reset();
        check_world(self);
        return seen;
      },
      over_shm());
  CHECK(results[0].seconds < 2);
  CHECK_THAT(
      results[0].error, ContainsText(leaves ? "has left the process group" : "(through Gloo)"));
}

}  // namespace ddp::shm_messages_test
