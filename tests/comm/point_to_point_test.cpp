// The handles of send_async and recv_async.
#include <ddp/collectives.h>

#include <thread>

#include <ATen/ATen.h>

#include "support/ranks.h"

#include "support/catch.h"

using ddp::testing::errors_of_ranks;
using ddp::testing::Rank;
using ddp::testing::RanksOptions;
using ddp::testing::run_ranks;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

bool completes(c10d::Work& work, std::chrono::milliseconds within = 10s) {
  const auto end = Clock::now() + within;
  while (Clock::now() < end) {
    if (work.isCompleted()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

}  // namespace

TEST_CASE("send and recv come to their end under polling, and wait() follows", "[comm][ranks]") {
  // A strided tensor is received in another one and copied at the end.
  const bool strided = GENERATE(false, true);
  const auto results = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    auto tensor = at::full({2, 3}, self.rank);
    if (strided) tensor = tensor.t();
    const auto work = self.rank == 1 ? ddp::send_async(tensor, 0, 0, self.group)
                                     : ddp::recv_async(tensor, 1, 0, self.group);
    TORCH_CHECK(completes(*work), "still not completed");
    TORCH_CHECK(work->isSuccess());
    const auto polled = tensor.clone();
    TORCH_CHECK(work->wait() && work->wait(1s), "a wait after it, and one more, return at once");
    return polled;
  });
  CHECK(results[0].eq(1).all().item<bool>());
}

TEST_CASE("c10d's own send and recv can be polled too", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<int>>(2, [](const Rank& self) {
    std::vector<at::Tensor> tensors{at::full({1}, self.rank)};
    const auto work =
        self.rank == 1 ? self.group->send(tensors, 0, 7) : self.group->recvAnysource(tensors, 7);
    TORCH_CHECK(completes(*work), "still not completed");
    return std::vector<int>{tensors[0].item<int>(), self.rank == 0 ? work->sourceRank() : 1};
  });
  CHECK(results[0] == std::vector<int>{1, 1});
}

TEST_CASE("a recv that fails is completed, and wait() says how", "[comm][ranks][errors]") {
  RanksOptions options;
  options.collective_timeout = 1s;
  const auto errors = errors_of_ranks(
      2,
      [](const Rank& self) {
        auto tensor = at::zeros({1});
        c10::intrusive_ptr<c10d::Work> work;
        if (self.rank == 0) {
          work = ddp::recv_async(tensor, 1, 0, self.group);
          TORCH_CHECK(completes(*work, 5s), "still not completed");
          TORCH_CHECK(!work->isSuccess() && work->exception());
        }
        ddp::monitored_barrier(10s, self.group);
        if (work) work->wait();
      },
      options);
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
}

TEST_CASE("a wait with a timeout of its own ends a poll that does not", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    auto tensor = at::zeros({1});
    std::string error;
    if (self.rank == 0) {
      const auto work = ddp::recv_async(tensor, 1, 0, self.group);
      TORCH_CHECK(!work->isCompleted());
      try {
        work->wait(100ms);
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      // Dropped here, while its thread waits for a message that never comes.
    }
    const auto start = Clock::now();
    ddp::monitored_barrier(10s, self.group);
    TORCH_CHECK(Clock::now() - start < 5s);
    TORCH_CHECK(error.empty(), error);
  });
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
}
