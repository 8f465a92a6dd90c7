// Messages between ranks of a host: what only shared memory has to get right. The cases of all
// transports are in point_to_point_test.cpp.
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::shm_messages_test {
namespace {

using namespace testing;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using namespace std::chrono_literals;

constexpr int64_t kShort = 10;
constexpr int64_t kLong = 100'000;

WorkPtr start_send(const Rank& self, at::Tensor tensor, int to, int tag = 0) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return self.group->getBackend(at::kCPU)->send(tensors, to, tag);
}

WorkPtr start_recv(const Rank& self, at::Tensor tensor, int from, int tag = 0) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return self.group->getBackend(at::kCPU)->recv(tensors, from, tag);
}

}  // namespace

TEST_CASE("more messages than the ring holds arrive in their order", "[shm]") {
  constexpr int kCount = 300;
  const int64_t numel = GENERATE(int64_t{10}, int64_t{25'000});
  const bool tags_backwards =
      GENERATE(false, true);  // 50 tags, of which the last is received first
  CAPTURE(numel, tags_backwards);
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < kCount; ++i) {
      const int first = i / 50 * 50;
      const int place = tags_backwards && self.rank == 1 ? first + 49 - i % 50 : i;
      const int tag = tags_backwards ? place % 50 : 3;
      tensors.push_back(at::full({numel}, self.rank == 0 ? place : -1, at::kInt));
      if (self.rank == 0) {
        works.push_back(start_send(self, tensors[i], 1, tag));
      } else {
        start_recv(self, tensors[i], 0, tag)->wait();
        TORCH_CHECK(tensors[i].eq(place).all().item<bool>(), "of another send than ", place);
      }
    }
    for (const auto& work : works) work->wait();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a message arrives after more unread ones than the ring holds", "[shm]") {
  constexpr int kBefore = 200;  // more than kMostMessages
  const int64_t numel = GENERATE(kShort, kLong);
  const auto errors = errors_of_ranks(2, over("shm", 10s), [&](const Rank& self) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i <= kBefore && self.rank == 0; ++i) {
      tensors.push_back(at::full({numel}, i, at::kInt));
      works.push_back(start_send(self, tensors[i], 1, i < kBefore ? 0 : 1));
    }
    const auto receive = [&](int tag, int value) {
      auto tensor = at::zeros({numel}, at::kInt);
      start_recv(self, tensor, 0, tag)->wait();
      TORCH_CHECK(tensor.eq(value).all().item<bool>(), "another message than ", value);
    };
    if (self.rank == 1) receive(1, kBefore);
    for (int i = 0; i < kBefore && self.rank == 1; ++i) receive(0, i);
    for (const auto& work : works) work->wait();
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a message goes on when its handle is dropped", "[shm]") {
  const int64_t numel = GENERATE(kShort, kLong);
  const auto results = run_ranks<int>(2, over("shm"), [&](const Rank& self) {
    auto tensor = at::full({numel}, self.rank == 0 ? 7 : 0, at::kInt);
    self.rank == 0 ? start_send(self, tensor, 1) : start_recv(self, tensor, 0);
    barrier(self.group);
    const auto has_arrived = [&] { return tensor.eq(7).all().item<bool>(); };
    // Nobody waits: the progress threads take it.
    for (int i = 0; i < 2000 && !has_arrived(); ++i) std::this_thread::sleep_for(1ms);
    return has_arrived() ? 1 : 0;
  });
  CHECK(results == std::vector<int>(2, 1));
}

TEST_CASE("what a rank sent before it left arrives if it was copied", "[shm][errors]") {
  auto errors = run_ranks<std::vector<std::string>>(2, over("shm"), [&](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    std::vector<std::string> own(2);
    if (self.rank == 0) {
      start_send(self, at::full({kShort}, 5.0), 1, 0);
      // In memory that the other rank reads, and that may be overwritten.
      const auto in_place = backend->allocateTensor(kLong, at::dtype(at::kFloat)).fill_(6);
      const auto sent = start_send(self, in_place, 1, 1);
      start_send(self, at::full({kLong}, 7.0), 1, 1);  // which is not the first with this tag
      backend->shutdown();
      own[1] = error_of([&] { sent->wait(); });
      in_place.fill_(-1);
      self.store->set("rank 0 has left", std::vector<uint8_t>{1});
      self.wait_until_others_end();
      return own;
    }
    self.store->wait({"rank 0 has left"});
    auto tensor = at::zeros({kShort});
    own[0] = error_of([&] { start_recv(self, tensor, 0, 0)->wait(); });
    TORCH_CHECK(tensor.eq(5).all().item<bool>(), "another value");
    auto late = at::zeros({kLong});
    const auto failed = timed_error_of([&] { start_recv(self, late, 0, 1)->wait(); });
    TORCH_CHECK(failed.seconds < 5, "after ", failed.seconds, " s");
    own[1] = failed.error;
    return own;
  });
  CHECK(errors[1][0].empty());
  CHECK_THAT(errors[1][1], ContainsText("shm: recv, rank 0, tag 1, on rank 1: rank 0 (process "));
  CHECK_THAT(errors[1][1], ContainsText("has left the process group"));
  CHECK_THAT(errors[0][1], ContainsText("the process group was destroyed"));
}

TEST_CASE("a rank that leaves after its last message has not failed", "[shm]") {
  const int64_t numel = GENERATE(kShort, kLong);
  for (int round = 0; round < 20; ++round) {
    const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
      auto tensor = at::full({numel}, static_cast<double>(self.rank));
      const auto work = self.rank == round % 2 ? start_send(self, tensor, 1 - self.rank)
                                               : start_recv(self, tensor, 1 - self.rank);
      work->wait();
      self.group->getBackend(at::kCPU)->shutdown();
      self.wait_until_others_end();
    });
    CHECK(errors == std::vector<std::string>(2));
  }
}

TEST_CASE("a message of any rank is an error once no rank is left", "[shm][errors]") {
  const auto errors = errors_of_ranks(3, over("shm"), [&](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    if (self.rank == 0) {
      std::vector<at::Tensor> tensors{at::zeros({kShort})};
      const auto work = backend->recvAnysource(tensors, 0);
      std::this_thread::sleep_for(200ms);
      TORCH_CHECK(!work->isCompleted() || work->isSuccess(), "failed while rank 2 is there");
      work->wait();
      TORCH_CHECK(work->sourceRank() == 2);
      backend->recvAnysource(tensors, 0)->wait();
    } else {
      if (self.rank == 2) {
        std::this_thread::sleep_for(500ms);
        start_send(self, at::ones({kShort}), 0);
      }
      backend->shutdown();
      self.wait_until_others_end();
    }
  });
  CHECK_THAT(errors[0], ContainsText("shm: recv from any rank with tag 0, on rank 0: rank "));
  CHECK(errors[1].empty());
  CHECK(errors[2].empty());
}

TEST_CASE("a tensor in shared memory is sent without a copy, others as they were", "[shm]") {
  const bool in_place = GENERATE(false, true);
  const auto results = run_ranks<int>(2, over("shm"), [&](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    auto tensor =
        in_place ? backend->allocateTensor(kLong, at::dtype(at::kFloat)) : at::empty({kLong});
    tensor.fill_(self.rank == 0 ? 1 : 0);
    if (self.rank == 0) {
      const auto work = start_send(self, tensor, 1);
      tensor.fill_(2);  // which no caller may do before the end
      barrier(self.group);
      work->wait();
      return 0;
    }
    barrier(self.group);
    start_recv(self, tensor, 0)->wait();
    return tensor[kLong - 1].item<int>();
  });
  CHECK(results[1] == (in_place ? 2 : 1));
}

TEST_CASE("threads of a rank send and receive at once", "[shm]") {
  constexpr int kThreads = 4, kMessages = 100;
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    std::vector<std::thread> threads;
    std::vector<std::string> own(kThreads);
    for (int tag = 0; tag < kThreads; ++tag) {
      threads.emplace_back([&, tag] {
        own[tag] = error_of([&] {
          for (int i = 0; i < kMessages; ++i) {
            const int64_t numel = i % 7 == 0 ? kLong / 4 : kShort;
            auto received = at::zeros({numel}, at::kInt);
            const auto work = start_recv(self, received, 1 - self.rank, tag);
            start_send(self, at::full({numel}, i, at::kInt), 1 - self.rank, tag)->wait();
            work->wait();
            TORCH_CHECK(received.eq(i).all().item<bool>(), "tag ", tag, ", message ", i);
          }
        });
      });
    }
    auto sum = at::ones({kShort});
    for (int i = 0; i < kMessages; ++i) all_reduce(sum, c10d::ReduceOp::MAX, self.group);
    for (auto& thread : threads) thread.join();
    for (const auto& error : own) TORCH_CHECK(error.empty(), error);
  });
  CHECK(errors == std::vector<std::string>(2));
}

}  // namespace ddp::shm_messages_test
