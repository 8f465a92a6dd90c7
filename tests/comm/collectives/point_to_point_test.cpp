// The handles of send_async and recv_async.
#include <ddp/collectives.h>

#include <algorithm>
#include <thread>

#include <ATen/ATen.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
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

TEST_CASE("send and recv complete by polling alone, and wait() then returns", "[comm][ranks]") {
  // A strided tensor is received into another one and copied at the end.
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

TEST_CASE("a recv that fails is completed, and wait() throws its error", "[comm][ranks][errors]") {
  const RanksOptions options{3s};
  const auto errors = errors_of_ranks(2, options, [](const Rank& self) {
    auto tensor = at::zeros({1});
    c10::intrusive_ptr<c10d::Work> work;
    if (self.rank == 0) {
      work = ddp::recv_async(tensor, 1, 0, self.group);
      TORCH_CHECK(completes(*work, 15s), "still not completed");
      TORCH_CHECK(!work->isSuccess() && work->exception());
    }
    ddp::monitored_barrier(10s, self.group);
    if (work) work->wait();
  });
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
}

TEST_CASE(
    "a wait with its own timeout throws if polling does not complete", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    auto tensor = at::zeros({1});
    std::string error;
    if (self.rank == 0) {
      const auto work = ddp::recv_async(tensor, 1, 0, self.group);
      TORCH_CHECK(!work->isCompleted());
      error = error_of([&] { work->wait(100ms); });
      // The work is dropped here, while its thread waits for a message that is never sent.
    }
    const auto start = Clock::now();
    ddp::monitored_barrier(20s, self.group);
    TORCH_CHECK(Clock::now() - start < 20s);
    TORCH_CHECK(error.empty(), error);
  });
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
}

namespace {

struct Message {
  int64_t numel;
  at::ScalarType dtype = at::kFloat;

  at::Tensor filled(int value) const { return at::full({numel}, value, dtype); }
};

std::string to_text(const Message& message) {
  return c10::str(message.numel, " x ", message.dtype);
}

// Numbers of elements of a message that fits in one packet, and of one that does not.
constexpr int64_t kShort = 10;
constexpr int64_t kLong = 20000;

}  // namespace

TEST_CASE(
    "a recv that does not match the send throws with both descriptions", "[comm][ranks][errors]") {
  const auto [sent, expected] = GENERATE(table<Message, Message>({
      {{2 * kShort}, {kShort}},
      {{kShort}, {2 * kShort}},
      {{kLong}, {kShort}},
      {{kShort}, {kLong}},
      {{kLong}, {kLong - 1}},
      {{kLong}, {2 * kLong}},
      {{kShort}, {kShort, at::kInt}},       // the same width
      {{2 * kShort}, {kShort, at::kLong}},  // the same number of bytes
      {{2 * kLong, at::kInt}, {kLong, at::kDouble}},
      {{kShort, at::kBool}, {kShort, at::kByte}},
      {{0}, {kShort}},
  }));
  const bool async = GENERATE(false, true);
  CAPTURE(to_text(sent), to_text(expected), async);
  const auto errors = errors_of_ranks(2, [&, &sent = sent, &expected = expected](const Rank& self) {
    if (self.rank == 0) {
      ddp::send(sent.filled(1), 1, 3, self.group);  // may return before the error
    } else {
      auto tensor = expected.filled(0);
      async ? void(ddp::recv_async(tensor, 0, 3, self.group)->wait())
            : void(ddp::recv(tensor, 0, 3, self.group));
    }
    self.wait_until_others_end();
  });
  CHECK_THAT(
      errors[1],
      ContainsText(
          "recv: expected a message of " + to_text(expected) + " from rank 0 with tag 3, got " +
          to_text(sent) + " on rank 1 of 2. Receive what was sent"));
  // If the error also ends a long send, it is the same one.
  if (!errors[0].empty()) CHECK_THAT(errors[0], ContainsText("recv: expected a message of "));
}

TEST_CASE("a message that is refused ends the group", "[comm][ranks][errors]") {
  const int64_t numel = GENERATE(kShort, kLong);
  const bool any_source = GENERATE(false, true);
  CAPTURE(numel, any_source);
  // c10d's own calls, which no monitor watches.
  const auto errors = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    std::vector<at::Tensor> tensors{at::full({numel + self.rank}, self.rank)};
    std::vector<std::string> own;
    if (self.rank == 0) {  // Gloo's own error
      own.push_back(error_of([&] { self.group->send(tensors, 1, 0)->wait(); }));
    } else {
      const auto receive = [&] {
        const auto work =
            any_source ? self.group->recvAnysource(tensors, 0) : self.group->recv(tensors, 0, 0);
        work->wait();
      };
      own.push_back(error_of(receive));
      own.push_back(error_of(receive));
      TORCH_CHECK(tensors[0].eq(1).all().item<bool>(), "written to");
    }
    self.wait_until_others_end();
    return own;
  });
  // Gloo has handed a short message over before it is refused.
  if (numel == kLong) CHECK_FALSE(errors[0][0].empty());
  CHECK_THAT(errors[1][0], ContainsText("recv: expected a message of "));
  CHECK_THAT(errors[1][1], ContainsText("expected a working process group"));
}

TEST_CASE("each rank receives while it sends", "[comm][ranks]") {
  const int size = GENERATE(2, 3);
  const int64_t numel = GENERATE(0, 1, kShort, 4096, 4097, kLong, 1 << 20);
  CAPTURE(size, numel);
  // A send of many elements ends once they are received, also if the receiver waits for its own
  // send.
  const auto results = run_ranks<int>(size, [&](const Rank& self) {
    const int previous = (self.rank + size - 1) % size;
    auto received = at::full({numel}, -1);
    const auto work = ddp::recv_async(received, previous, 0, self.group);
    ddp::send(at::full({numel}, self.rank), (self.rank + 1) % size, 0, self.group);
    work->wait();
    return received.eq(previous).all().item<bool>() ? 1 : 0;
  });
  CHECK(results == std::vector<int>(static_cast<size_t>(size), 1));
}

TEST_CASE("a send ends once it is received, whatever its size", "[comm][ranks]") {
  const int64_t numel = GENERATE(0, 1, kShort, kLong, 1 << 20);
  CAPTURE(numel);
  const auto early = run_ranks<int>(2, [&](const Rank& self) {
    auto tensor = at::full({numel}, self.rank);
    if (self.rank == 1) {
      ddp::barrier(self.group);
      ddp::recv(tensor, 0, 0, self.group);
      return 0;
    }
    const auto work = ddp::send_async(tensor, 1, 0, self.group);
    int ended = 0;
    for (int i = 0; i < 100; ++i) ended += work->isCompleted() ? 1 : 0;
    ddp::barrier(self.group);  // after which it is received
    work->wait();
    return ended;
  });
  CHECK(early == std::vector<int>(2, 0));
}

TEST_CASE("ranks that send to each other first are told so", "[comm][ranks][errors]") {
  const int64_t numel = GENERATE(kShort, kLong);
  CAPTURE(numel);
  const RanksOptions options{std::chrono::seconds(6)};  // ranks report waits of two
  const auto errors = errors_of_ranks(2, options, [&](const Rank& self) {
    auto tensor = at::full({numel}, self.rank);
    ddp::send(tensor, 1 - self.rank, 5, self.group);
    ddp::recv(tensor, 1 - self.rank, 5, self.group);
  });
  for (const auto& error : errors) {
    const auto other = [&](int rank) {
      return "; rank " + std::to_string(rank) + " waits in send to rank " +
             std::to_string(1 - rank) +
             " with tag 5. A send ends once it is received: receive first";
    };
    CHECK_THAT(error, ContainsText(other(0)) || ContainsText(other(1)));
    CHECK_THAT(error, !ContainsText("had arrived"));
  }
}

TEST_CASE("many pending messages keep their order", "[comm][ranks]") {
  const bool backwards = GENERATE(false, true);  // the order of the waits
  CAPTURE(backwards);
  const std::vector<Message> messages{
      {kShort},
      {kLong},
      {kLong, at::kInt},
      {0},
      {kShort, at::kShort},
      {2 * kLong},
      {kShort},
      {kLong, at::kComplexFloat},
      {1, at::kBool},
      {kLong}};
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (size_t i = 0; i < messages.size(); ++i) {
      const int value = self.rank == 0 ? static_cast<int>(i) + 1 : 0;
      tensors.push_back(messages[i].filled(value));
      // Tags 0 and 1 alternate, and each has its own order.
      const int tag = static_cast<int>(i) % 2;
      works.push_back(
          self.rank == 0 ? ddp::send_async(tensors[i], 1, tag, self.group)
                         : ddp::recv_async(tensors[i], 0, tag, self.group));
    }
    if (backwards) std::reverse(works.begin(), works.end());
    for (const auto& work : works) work->wait();
    return tensors;
  });
  for (size_t i = 0; i < messages.size(); ++i) {
    CAPTURE(i);
    CHECK(at::equal(results[1][i], results[0][i]));
  }
}

TEST_CASE("messages of any source, and c10d's own calls, match this library's", "[comm][ranks]") {
  const int64_t numel = GENERATE(kShort, kLong);
  const auto results = run_ranks<std::vector<int>>(3, [&](const Rank& self) {
    std::vector<int> seen;
    if (self.rank == 0) {
      for (int i = 0; i < 4; ++i) {
        std::vector<at::Tensor> tensors{at::zeros({numel}, at::kInt)};
        const auto work = self.group->recvAnysource(tensors, 2);
        work->wait();
        TORCH_CHECK(tensors[0].eq(work->sourceRank()).all().item<bool>(), "of another rank");
        seen.push_back(work->sourceRank());
      }
      auto tensor = at::zeros({numel}, at::kInt);
      ddp::recv(tensor, 2, 3, self.group);
      seen.push_back(tensor[0].item<int>());
    } else {
      std::vector<at::Tensor> tensors{at::full({numel}, self.rank, at::kInt)};
      for (int i = 0; i < 2; ++i) ddp::send(tensors[0], 0, 2, self.group);
      if (self.rank == 2) self.group->send(tensors, 0, 3)->wait();
    }
    std::sort(seen.begin(), seen.end());
    return seen;
  });
  CHECK(results[0] == std::vector<int>{1, 1, 2, 2, 2});
}

TEST_CASE("c10d's monitored barrier matches its messages", "[comm][ranks]") {
  const auto results = run_ranks<int>(2, [](const Rank& self) {
    // Each of these calls leaves another tag.
    for (int numel = 1; numel < 9; ++numel) {
      std::vector<at::Tensor> two{at::ones({numel}), at::ones({numel})};
      self.group->allreduce(two)->wait();  // over Gloo, also in an shm group
      self.group->monitoredBarrier(c10d::BarrierOptions());
    }
    return 1;
  });
  CHECK(results == std::vector<int>(2, 1));
}

TEST_CASE("a batch of messages goes around a ring", "[comm][ranks]") {
  const auto received = run_ranks<std::vector<int>>(3, [](const Rank& self) {
    const int next = (self.rank + 1) % self.size, before = (self.rank + 2) % self.size;
    auto one = at::zeros({4}, at::kInt), two = at::zeros({2, 2}, at::kInt).t();
    const auto works = ddp::batch_isend_irecv(
        {ddp::P2POp::send(at::full({4}, self.rank, at::kInt), next, 1),
         ddp::P2POp::send(at::full({2, 2}, 10 + self.rank, at::kInt), next, 2),
         ddp::P2POp::recv(two, before, 2), ddp::P2POp::recv(one, before, 1)},
        self.group);
    for (const auto& work : works) work->wait();
    return std::vector<int>{
        one.min().item<int>(), one.max().item<int>(), two.min().item<int>(), two.max().item<int>()};
  });
  for (int rank = 0; rank < 3; ++rank) {
    const int before = (rank + 2) % 3;
    CHECK(received[rank] == std::vector<int>{before, before, 10 + before, 10 + before});
  }
}

TEST_CASE("a batch of messages is checked before any is sent", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto tensor = at::ones({1});
    self.rank == 0 ? ddp::batch_isend_irecv({}, self.group)
                   : ddp::batch_isend_irecv(
                         {ddp::P2POp::send(tensor, 0), ddp::P2POp::recv(tensor, 7)}, self.group);
  });
  CHECK_THAT(errors[0], ContainsText("batch_isend_irecv: expected at least one message, got none"));
  CHECK_THAT(errors[1], ContainsText("recv: expected") && ContainsText("src") && ContainsText("7"));
}
