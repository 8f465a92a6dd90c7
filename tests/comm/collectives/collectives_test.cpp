#include <ddp/collectives.h>

#include <ATen/ATen.h>

#include "comm/tensors.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using c10d::ReduceOp;
using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {}  // namespace

TEST_CASE("all_reduce adds up, in place, on every rank", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong,
      at::kComplexFloat, at::kComplexDouble);
  CAPTURE(size, dtype);
  const auto results = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    auto tensor = filled(self.rank + 1, dtype);
    ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
    return tensor;
  });
  for (const auto& result : results) CHECK(at::equal(result, filled(size * (size + 1) / 2, dtype)));
}

TEST_CASE("all_reduce uses the given operation", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  // Rank r gives r + 1.
  const auto [op, expected] = GENERATE(table<ReduceOp::RedOpType, std::vector<double>>({
      {ReduceOp::SUM, {1, 3, 6}},
      {ReduceOp::PRODUCT, {1, 2, 6}},
      {ReduceOp::MIN, {1, 1, 1}},
      {ReduceOp::MAX, {1, 2, 3}},
      {ReduceOp::AVG, {1, 1.5, 2}},
  }));
  CAPTURE(size, static_cast<int>(op));
  const auto results = run_ranks<at::Tensor>(size, [op = op](const Rank& self) {
    auto tensor = filled(self.rank + 1);
    ddp::all_reduce(tensor, op, self.group);
    return tensor;
  });
  for (const auto& result : results) CHECK(at::equal(result, filled(expected[size - 1])));
}

TEST_CASE("bitwise operations work on whole numbers", "[comm][ranks]") {
  const auto [op, expected] = GENERATE(table<ReduceOp::RedOpType, int>(
      {{ReduceOp::BAND, 0b0100}, {ReduceOp::BOR, 0b0111}, {ReduceOp::BXOR, 0b0011}}));
  const auto results = run_ranks<at::Tensor>(2, [op = op](const Rank& self) {
    auto tensor = filled(self.rank == 0 ? 0b0101 : 0b0110, at::kInt);
    ddp::all_reduce(tensor, op, self.group);
    return tensor;
  });
  for (const auto& result : results) CHECK(at::equal(result, filled(expected, at::kInt)));
}

TEST_CASE("SUM of bool is or and PRODUCT is and, at any world size", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto results = run_ranks<std::vector<at::Tensor>>(size, [](const Rank& self) {
    // Per column: true on all ranks, on rank 0 only, on none.
    auto sum = at::tensor({1, self.rank == 0 ? 1 : 0, 0}).to(at::kBool);
    auto product = sum.clone();
    ddp::all_reduce(sum, ReduceOp::SUM, self.group);
    ddp::all_reduce(product, ReduceOp::PRODUCT, self.group);
    // As bytes, because an invalid bool of value 2 would read as true.
    return std::vector<at::Tensor>{sum.view(at::kByte), product.view(at::kByte)};
  });
  for (const auto& result : results) {
    CHECK(at::equal(result[0], at::tensor({1, 1, 0}, at::kByte)));
    CHECK(at::equal(result[1], at::tensor({1, size == 1 ? 1 : 0, 0}, at::kByte)));
  }
}

TEST_CASE("complex numbers are averaged", "[comm][ranks]") {
  const auto results = run_ranks<at::Tensor>(2, [](const Rank& self) {
    auto tensor = at::complex(filled(self.rank), filled(2 * self.rank));
    ddp::all_reduce(tensor, ReduceOp::AVG, self.group);
    return tensor;
  });
  for (const auto& result : results) CHECK(at::equal(result, at::complex(filled(0.5), filled(1))));
}

TEST_CASE("strides may differ between ranks", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    const auto numbers = at::arange(6, at::kFloat).view({2, 3});
    auto sum = self.rank == 0 ? numbers.clone() : strided(numbers);
    ddp::all_reduce(sum, ReduceOp::AVG, self.group);
    auto sent = self.rank == 0 ? strided(numbers) : at::zeros({2, 3});
    ddp::broadcast(sent, 0, self.group);
    // Every second column of a wider tensor, and a lazily conjugated one.
    auto wide = at::zeros({2, 6});
    auto columns = wide.slice(1, 0, 6, 2);
    columns.copy_(numbers);
    ddp::all_reduce(columns, ReduceOp::SUM, self.group);
    auto conjugated = at::complex(numbers, numbers).conj();
    ddp::all_reduce(conjugated, ReduceOp::AVG, self.group);
    return std::vector<at::Tensor>{sum, sent, wide, at::imag(conjugated).clone()};
  });
  const auto numbers = at::arange(6, at::kFloat).view({2, 3});
  for (const auto& result : results) {
    CHECK(at::equal(result[0], numbers));
    CHECK(at::equal(result[1], numbers));
    CHECK(at::equal(result[2].slice(1, 0, 6, 2), 2 * numbers));
    CHECK(at::equal(result[2].slice(1, 1, 6, 2), at::zeros({2, 3})));
    CHECK(at::equal(result[3], -numbers));
  }
}

TEST_CASE("broadcast carries every dtype", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(
      at::kFloat, at::kBool, at::kShort, at::kComplexFloat, at::kComplexHalf, at::kFloat8_e4m3fn,
      at::kUInt16);
  const int src = size - 1;
  CAPTURE(size, dtype);
  const auto results = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    auto tensor = filled(self.rank == src ? 1 : 0).to(dtype);
    ddp::broadcast(tensor, src, self.group);
    return tensor;
  });
  // As bytes, because not every dtype can be compared.
  const auto expected = filled(1).to(dtype).view(at::kByte);
  for (const auto& result : results) CHECK(at::equal(result.view(at::kByte), expected));
}

TEST_CASE("scalars, empty tensors and parameters are sent too", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    auto scalar = at::scalar_tensor(self.rank + 1.0, at::kFloat);
    ddp::all_reduce(scalar, ReduceOp::SUM, self.group);
    auto empty = at::empty({0, 4});
    ddp::all_reduce(empty, ReduceOp::SUM, self.group);
    auto parameter = filled(self.rank).requires_grad_();
    ddp::broadcast(parameter, 1, self.group);
    auto averaged = strided(filled(self.rank)).requires_grad_();
    ddp::all_reduce(averaged, ReduceOp::AVG, self.group);
    return std::vector<at::Tensor>{scalar, empty, parameter, averaged};
  });
  for (const auto& result : results) {
    CHECK(at::equal(result[0], at::scalar_tensor(3.0, at::kFloat)));
    CHECK(result[1].sizes() == at::IntArrayRef{0, 4});
    CHECK(at::equal(result[2], filled(1)));
    CHECK(result[2].is_leaf());
    CHECK(at::equal(result[3], filled(0.5)));
  }
}

TEST_CASE("all_reduce of a temporary returns the result", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    const auto own = filled(self.rank + 1).requires_grad_();
    const auto half = ddp::all_reduce(own / 2, ReduceOp::SUM, self.group);
    const auto least = ddp::all_reduce(strided(filled(self.rank)), ReduceOp::MIN, self.group);
    auto rows = filled(self.rank);
    const auto row = ddp::all_reduce(rows[0], ReduceOp::SUM, self.group);
    const auto grad = half.requires_grad() ? filled(1) : filled(0);
    return std::vector<at::Tensor>{half, own.detach(), least, row, rows[0].clone(), grad};
  });
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const auto& result = results[rank];
    CHECK(at::equal(result[0], filled(1.5)));
    CHECK(at::equal(result[1], filled(static_cast<double>(rank) + 1)));
    CHECK(at::equal(result[2], filled(0)));
    CHECK(at::equal(result[3], filled(1)[0]));
    CHECK(at::equal(result[4], filled(1)[0]));  // a view is reduced in place
    CHECK(at::equal(result[5], filled(0)));     // and the result belongs to no graph
  }
}

TEST_CASE("reduce leaves the result on dst", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto op = GENERATE(ReduceOp::SUM, ReduceOp::AVG);
  const int dst = size - 1;
  CAPTURE(size);
  const auto results = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    auto tensor = strided(filled(self.rank + 1));
    ddp::reduce(tensor, dst, op, self.group);
    return tensor;
  });
  const double sum = size * (size + 1) / 2.0;
  CHECK(at::equal(results[dst], filled(op == ReduceOp::SUM ? sum : sum / size)));
}

TEST_CASE("send and recv match by rank and tag", "[comm][ranks]") {
  const int size = GENERATE(2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kBool, at::kComplexDouble, at::kShort);
  CAPTURE(size, dtype);
  // Each rank sends its number to the next, around the ring: two tags, sent in one order and
  // received in the other.
  const auto results = run_ranks<std::vector<at::Tensor>>(size, [&](const Rank& self) {
    const int next = (self.rank + 1) % self.size;
    const int previous = (self.rank + self.size - 1) % self.size;
    const auto one = ddp::send_async(filled(self.rank, dtype), next, 1, self.group);
    const auto two = ddp::send_async(strided(filled(1, dtype)), next, 2, self.group);
    auto second = strided(filled(0, dtype));
    auto first = filled(0, dtype);
    ddp::recv(second, previous, 2, self.group);
    ddp::recv(first, previous, 1, self.group);
    one->wait();
    two->wait();
    return std::vector<at::Tensor>{first, second};
  });
  for (int rank = 0; rank < size; ++rank) {
    const int previous = (rank + size - 1) % size;
    CHECK(at::equal(results[rank][0], filled(previous, dtype)));
    CHECK(at::equal(results[rank][1], filled(1, dtype)));
  }
}

TEST_CASE("handles complete without a wait, and give a future", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    // AVG over Gloo and strided tensors both need a step of this library after the backend's.
    auto polled = strided(filled(self.rank));
    const auto work = ddp::all_reduce_async(polled, ReduceOp::AVG, self.group);
    while (!work->isCompleted()) std::this_thread::yield();
    auto future_backed = strided(filled(self.rank));
    const auto other = ddp::all_reduce_async(future_backed, ReduceOp::AVG, self.group);
    other->getFuture()->wait();
    const auto after_future = future_backed.clone();
    other->wait();  // the step must not run again
    other->wait();
    return std::vector<at::Tensor>{polled, after_future, future_backed};
  });
  for (const auto& result : results) {
    for (const auto& tensor : result) CHECK(at::equal(tensor, filled(0.5)));
  }
}

TEST_CASE("a barrier returns after the last rank has called it", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  std::atomic<int> arrived{0};
  const auto seen = run_ranks<int>(size, [&](const Rank& self) {
    ++arrived;
    ddp::barrier(self.group);
    const int all = arrived;
    ++arrived;
    ddp::monitored_barrier(20s, self.group);
    return all >= self.size && arrived == 2 * self.size ? 1 : 0;
  });
  CHECK(seen == std::vector<int>(size, 1));
}

TEST_CASE(
    "monitored_barrier names the missing ranks on every rank that calls it",
    "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    ddp::monitored_barrier(20s, self.group);
    if (self.rank == 1) return;
    ddp::monitored_barrier(3s, self.group);
  });
  CHECK(errors[1].empty());
  for (const int rank : {0, 2}) {
    CHECK_THAT(
        errors[rank],
        ContainsText("monitored_barrier: expected all 3 ranks within 3000 ms, but rank 1 did not"));
  }
}

TEST_CASE(
    "a collective that a rank leaves out throws within the group's timeout",
    "[comm][ranks][errors]") {
  const RanksOptions options{3s};
  std::vector<double> seconds(2, 0);
  const auto errors = errors_of_ranks(2, options, [&](const Rank& self) {
    auto tensor = filled(1);
    if (self.rank == 0) {
      const auto start = std::chrono::steady_clock::now();
      const auto note = [&] {
        seconds[0] =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      };
      try {
        ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
      } catch (...) {
        note();
        ddp::monitored_barrier(10s, self.group);
        throw;
      }
    }
    ddp::monitored_barrier(10s, self.group);  // keeps the connection of rank 1 open
  });
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
  CHECK(seconds[0] >= 2.9);
  CHECK(seconds[0] < 15);  // the rank looks for the reason for a while
}

TEST_CASE("a recv without a send throws within the group's timeout", "[comm][ranks][errors]") {
  const RanksOptions options{3s};
  const auto errors = errors_of_ranks(2, options, [&](const Rank& self) {
    if (self.rank == 0) {
      auto tensor = filled(1);
      try {
        ddp::recv(tensor, 1, 0, self.group);
      } catch (...) {
        ddp::monitored_barrier(10s, self.group);
        throw;
      }
    }
    ddp::monitored_barrier(10s, self.group);
  });
  CHECK_THAT(errors[0], ContainsText("imed out"));
  CHECK(errors[1].empty());
}

TEST_CASE("a group may follow the arguments that have no default", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    const auto& group = self.group;
    const int other = 1 - self.rank;
    const auto own = filled(self.rank + 1);
    std::vector<at::Tensor> sums;
    for (const bool async : {false, true}) {
      auto all = own.clone();
      async ? void(ddp::all_reduce_async(all, group)->wait()) : ddp::all_reduce(all, group);
      auto on_first = own.clone();
      async ? void(ddp::reduce_async(on_first, 0, group)->wait()) : ddp::reduce(on_first, 0, group);
      if (self.rank == 1) on_first.fill_(3);
      auto part = filled(0);
      async ? void(ddp::reduce_scatter_async(part, {own, own}, group)->wait())
            : ddp::reduce_scatter(part, {own, own}, group);
      auto row = at::zeros({3});
      async ? void(ddp::reduce_scatter_tensor_async(row, own, group)->wait())
            : ddp::reduce_scatter_tensor(row, own, group);
      auto exchanged = filled(0);
      async ? void(ddp::all_to_all_single_async(exchanged, own, group)->wait())
            : ddp::all_to_all_single(exchanged, own, group);
      auto received = filled(0);
      if (async) {
        const auto sent = ddp::send_async(own, other, group);
        ddp::recv_async(received, other, group)->wait();
        sent->wait();
      } else {
        if (self.rank == 0) ddp::send(own, other, group);
        ddp::recv(received, other, group);
        if (self.rank == 1) ddp::send(own, other, group);
      }
      for (const auto& sum : {all, on_first, part, row, exchanged.sum(0), received + own}) {
        sums.push_back(sum);
      }
    }
    sums.push_back(ddp::all_reduce(own * 1, group));
    // Empty braces still mean split sizes.
    auto output = filled(0);
    ddp::all_to_all_single(output, own, {}, {}, group);
    sums.push_back(output.sum(0));
    return sums;
  });
  for (const auto& sums : results) {
    for (const auto& sum : sums) CHECK(sum.eq(3).all().item<bool>());
  }
}

TEST_CASE("bad arguments are errors before anything is sent", "[comm][ranks][errors]") {
  // Each call is bad on every rank, and the all_reduce after them shows that none was sent.
  using Call = std::function<void(const ddp::ProcessGroup&)>;
  const auto [call, message] = GENERATE(table<Call, std::string>({
      {[](const auto& group) {
         at::Tensor t;
         ddp::all_reduce(t, ReduceOp::SUM, group);
       },
       "all_reduce: expected a defined tensor"},
      {[](const auto& group) {
         auto t = filled(1).to_sparse();
         ddp::all_reduce(t, ReduceOp::SUM, group);
       },
       "all_reduce: expected a dense tensor, got layout Sparse"},
      {[](const auto& group) {
         auto t = filled(1).to(at::kMeta);
         ddp::broadcast(t, 0, group);
       },
       "broadcast: expected a tensor on a device the group has a backend for"},
      {[](const auto& group) {
         auto t = filled(1);
         ddp::broadcast(t, 2, group);
       },
       "broadcast: expected src to be a rank of the group, 0 to 1, got 2"},
      {[](const auto& group) {
         auto t = filled(1);
         ddp::reduce(t, -1, ReduceOp::SUM, group);
       },
       "reduce: expected dst to be a rank of the group, 0 to 1, got -1"},
      {[](const auto& group) { ddp::send(filled(1), group->getRank(), 0, group); },
       "send: expected dst to be another rank, got this one"},
      {[](const auto& group) {
         auto t = filled(1);
         ddp::recv(t, 5, 0, group);
       },
       "recv: expected src to be a rank of the group"},
      {[](const auto& group) { ddp::send(filled(1), 1 - group->getRank(), -1, group); },
       "send: expected a tag of 0 to 1073741823, got -1"},
      {[](const auto& group) {
         auto t = filled(1);
         ddp::recv(t, 1 - group->getRank(), 1 << 30, group);
       },
       "recv: expected a tag of 0 to 1073741823, got 1073741824"},
      {[](const auto& group) {
         auto t = filled(1, at::kInt);
         ddp::all_reduce(t, ReduceOp::AVG, group);
       },
       "all_reduce: expected a floating-point or complex tensor for AVG, got Int"},
      {[](const auto& group) {
         auto t = filled(1, at::kComplexFloat);
         ddp::all_reduce(t, ReduceOp::MAX, group);
       },
       "all_reduce: expected SUM or AVG for complex tensors"},
      {[](const auto& group) { ddp::monitored_barrier(0ms, group); },
       "monitored_barrier: expected a timeout of more than 0 ms"},
  }));
  const auto errors = errors_of_ranks(2, [call = call](const Rank& self) {
    const auto error = error_of<c10::ValueError>([&] { call(self.group); });
    auto tensor = filled(1);
    ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
    TORCH_CHECK(at::equal(tensor, filled(2)), "out of step");
    TORCH_CHECK(false, error);
  });
  for (int rank = 0; rank < 2; ++rank) {
    // The rank is followed by advice.
    const auto place = " on rank " + std::to_string(rank) + " of 2. ";
    CHECK_THAT(errors[rank], ContainsText(message) && ContainsText(place));
  }
}
