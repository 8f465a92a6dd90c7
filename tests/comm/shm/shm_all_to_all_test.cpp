// An all-to-all through shared memory: the place of tensors, their parts, and failures.
#include <chrono>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>

#include "comm/backends/shm/sync/control_block.h"
#include "support/error_of.h"
#include "support/hosts.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kSlotBytes = 1 << 20;  // ExchangedTensors::kSlot
constexpr int64_t kTableBytes = 4096;

/// Bytes that depend on the sender, the receiver and the position, in a slot and of the slot.
at::Tensor letter(int from, int to, int64_t bytes) {
  const auto at = at::arange(bytes, at::kInt);
  return (at * 7 + at.bitwise_right_shift(8) + at.bitwise_right_shift(20) * 13)
      .add_(31 * from + 101 * to)
      .bitwise_and_(255)
      .to(at::kByte);
}

at::Tensor letters_from(int rank, const std::vector<int64_t>& bytes) {
  std::vector<at::Tensor> parts;
  for (size_t to = 0; to < bytes.size(); ++to) {
    parts.push_back(letter(rank, static_cast<int>(to), bytes[to]));
  }
  return at::cat(parts);
}

at::Tensor letters_to(int rank, const std::vector<int64_t>& bytes) {
  std::vector<at::Tensor> parts;
  for (size_t from = 0; from < bytes.size(); ++from) {
    parts.push_back(letter(static_cast<int>(from), rank, bytes[from]));
  }
  return at::cat(parts);
}

/// A backend over the ranks' shared memory, with that many bytes per rank for tensors.
c10::intrusive_ptr<c10d::Backend> backend_with_arena(const Rank& self, size_t bytes) {
  // Rank 0 has the group's state, too.
  const auto state = ddp::backends::shm::ControlBlock::bytes_for(self.size);
  if (self.rank == 0) bytes += (state + kTableBytes - 1) / kTableBytes * kTableBytes;
  const std::string one_host(static_cast<size_t>(self.size), 'a');
  const auto shared = share_on_hosts(self.store, self.rank, one_host, 30s, 30s, bytes);
  TORCH_CHECK(shared.backend, shared.why_not);
  return shared.backend;
}

void exchange(
    c10d::Backend& backend, at::Tensor to, at::Tensor from, std::vector<int64_t> received = {},
    std::vector<int64_t> sent = {}) {
  backend.DDP_ALL_TO_ALL_SINGLE(to, from, received, sent)->wait();
}

}  // namespace

TEST_CASE("parts larger than a slot, one slot, and none arrive whole", "[shm][ranks]") {
  const int size = GENERATE(2, 3, 4);
  // How many bytes rank s sends to rank r: from none to several slots and a rest.
  const auto bytes = [](int s, int r) {
    const std::vector<int64_t> sizes{0,          3 * kSlotBytes + 5, 1, 2 * kSlotBytes,
                                     kSlotBytes, kSlotBytes + 1,     0, 777};
    return sizes[static_cast<size_t>(3 * s + r) % sizes.size()];
  };
  const auto results = run_ranks<int>(size, over("shm"), [&](const Rank& self) {
    std::vector<int64_t> sent;
    std::vector<int64_t> received;
    for (int other = 0; other < self.size; ++other) {
      sent.push_back(bytes(self.rank, other));
      received.push_back(bytes(other, self.rank));
    }
    const auto expected = letters_to(self.rank, received);
    const auto input = letters_from(self.rank, sent);
    int right = 0;
    for (int i = 0; i < 5; ++i) {  // with pending collectives between them
      auto sum = at::full({1000}, self.rank + i);
      const auto summed = ddp::all_reduce_async(sum, c10d::ReduceOp::SUM, self.group);
      auto first = at::zeros_like(expected);
      auto second = at::zeros_like(expected);
      const auto one = ddp::all_to_all_single_async(first, input, received, sent, self.group);
      const auto two = ddp::all_to_all_single_async(second, input, received, sent, self.group);
      std::vector<at::Tensor> lists = at::zeros_like(expected).split_with_sizes(received);
      ddp::all_to_all(lists, input.split_with_sizes(sent), self.group);
      two->wait();
      one->wait();
      summed->wait();
      const int total = self.size * (self.size - 1) / 2 + self.size * i;
      right += at::equal(first, expected) && at::equal(second, expected) &&
               at::equal(at::cat(lists), expected) && sum.eq(total).all().item<bool>();
    }
    return right;
  });
  CHECK(results == std::vector<int>(static_cast<size_t>(size), 5));
}

TEST_CASE("lists of any layout are exchanged", "[shm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, over("shm"), [](const Rank& self) {
    std::vector<at::Tensor> from{
        at::arange(6).view({2, 3}).t() + 10 * self.rank,
        at::arange(12).view({3, 4}).narrow(1, 1, 2) + 10 * self.rank};
    std::vector<at::Tensor> to;
    for (int r = 0; r < 2; ++r) to.push_back(at::zeros({2, 3}, at::kLong).t());
    self.group->getBackend(at::kCPU)->alltoall(to, from)->wait();
    return to;
  });
  for (int64_t from = 0; from < 2; ++from) {
    CHECK(at::equal(results[0][from], at::arange(6).view({2, 3}).t() + 10 * from));
    const auto second = at::arange(12).view({3, 4}).narrow(1, 1, 2) + 10 * from;
    CHECK(at::equal(results[1][from], second));
  }
}

TEST_CASE("tensors of the arena are read in place", "[shm][ranks]") {
  // Besides the input, the arena only has space for a table.
  constexpr int64_t kBytes = 14 * kTableBytes;
  const auto results = run_ranks<at::Tensor>(2, [](const Rank& self) {
    const auto backend = backend_with_arena(self, kBytes + kTableBytes);
    auto input = backend->allocateTensor(kBytes, at::dtype(at::kByte));
    input.copy_(letters_from(self.rank, {kBytes / 2, kBytes / 2}));
    auto output = at::zeros_like(input);
    exchange(*backend, output, input);
    return output.clone();
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(at::equal(results[rank], letters_to(rank, {kBytes / 2, kBytes / 2})));
  }
}

TEST_CASE("a large all-to-all takes two slots of memory for each receiver", "[shm][ranks]") {
  constexpr int64_t kPart = 5 * kSlotBytes + 3;
  const auto results = run_ranks<int>(3, [kPart = kPart](const Rank& self) {
    const auto backend = backend_with_arena(self, 4 * kSlotBytes + kTableBytes);
    const std::vector<int64_t> parts(3, kPart);
    const auto input = letters_from(self.rank, parts), expected = letters_to(self.rank, parts);
    int right = 0;
    for (int i = 0; i < 2; ++i) {
      auto output = at::zeros({3 * kPart}, at::kByte);
      exchange(*backend, output, input);
      right += at::equal(output, expected);
    }
    return right;
  });
  CHECK(results == std::vector<int>(3, 2));
}

TEST_CASE(
    "splits that do not match throw on every rank, and the backend still works", "[shm][errors]") {
  std::vector<std::string> caught(3);
  const auto results = run_ranks<int>(3, over("shm"), [&](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    const auto input = at::full({6}, self.rank, at::kFloat);
    caught[self.rank] = error_of<c10::Error>([&] {
      // Rank 2 expects one element more from rank 1 than it sends, and one less from itself.
      if (self.rank == 2) {
        exchange(*backend, at::zeros({6}), input, {2, 3, 1}, {2, 2, 2});
      } else {
        exchange(*backend, at::zeros({6}), input);
      }
    });
    auto output = at::zeros({6});
    exchange(*backend, output, input);
    return output.eq(at::arange(6).floor_divide(2)).all().item<int>();
  });
  CHECK(results == std::vector<int>(3, 1));
  for (const auto& text : caught) {
    CHECK(
        text ==
        "shm: all_to_all: expected every rank to receive as many elements as are sent to it, but "
        "rank 1 sends 2 to rank 2, which expects 3. Let the output splits on each rank be the "
        "other ranks' input splits for it.");
  }
}

TEST_CASE("where sizes do not match no rank copies, in no round", "[shm][errors]") {
  constexpr int64_t kPart = 3 * kSlotBytes;
  constexpr int64_t kExpected = 16;
  std::vector<std::string> caught(2);
  const auto untouched = run_ranks<int>(2, over("shm"), [&](const Rank& self) {
    // Rank 0 sends what rank 1 expects, in several rounds. Rank 1 sends far too much.
    const auto memory = at::full({kPart}, 7, at::kByte);
    const auto expected = self.rank == 0 ? memory.narrow(0, 0, kExpected) : memory;
    std::vector<at::Tensor> to(2, at::empty({0}, at::kByte)), from = to;
    to[1 - self.rank] = expected;
    from[1 - self.rank] = letter(self.rank, 1 - self.rank, kPart);
    const auto backend = self.group->getBackend(at::kCPU);
    caught[self.rank] = error_of<c10::Error>([&] { backend->alltoall(to, from)->wait(); });
    auto sum = at::full({1000}, 1);
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, self.group);
    return memory.eq(7).all().item<int>() + sum.eq(2).all().item<int>();
  });
  CHECK(untouched == std::vector<int>(2, 2));
  CHECK_THAT(caught, Each(ContainsText("rank 1 sends 3145728 to rank 0, which expects 16")));
}

TEST_CASE("splits that do not match fail the group's call on every rank", "[shm][errors]") {
  const auto errors = errors_of_ranks(2, over("shm"), [](const Rank& self) {
    auto output = at::zeros({4 + self.rank});
    ddp::all_to_all_single(
        output, at::zeros({4}),
        self.rank == 0 ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{3, 2}, {2, 2},
        self.group);
  });
  CHECK_THAT(errors, Each(ContainsText("rank 0 sends 2 to rank 1, which expects 3")));
}

TEST_CASE("splits that c10d refuses are refused, and no rank waits", "[shm][errors]") {
  // One rank passes bad splits while the other one exchanges.
  const auto errors = errors_of_ranks(2, over("shm"), [](const Rank& self) {
    auto output = at::zeros({4});
    const auto input = at::zeros({4});
    const auto splits = self.rank == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{1, 2};
    exchange(*self.group->getBackend(at::kCPU), output, input, splits, splits);
  });
  for (const auto& error : errors) CHECK_FALSE(error.empty());
}

TEST_CASE("parts that are no rows of a tensor are refused, and no rank waits", "[shm][errors]") {
  const bool negative = GENERATE(false, true);
  CAPTURE(negative);
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    const int64_t rows = self.rank == 0 || negative ? 4 : 3;
    auto output = at::zeros({rows, 4});
    const auto input = at::zeros({rows, 4});
    const auto splits =
        self.rank == 1 && negative ? std::vector<int64_t>{-1, 5} : std::vector<int64_t>{};
    exchange(*self.group->getBackend(at::kCPU), output, input, splits, splits);
  });
  for (const auto& error : errors) CHECK_FALSE(error.empty());
  if (!negative) CHECK_THAT(errors[0], ContainsText("expected as many rows for each of 2 ranks"));
}
