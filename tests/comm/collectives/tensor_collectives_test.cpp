// Collectives from one tensor into one tensor.
#include <chrono>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/internal/text.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using Catch::Matchers::Contains;
using namespace ddp::testing;
using Op = c10d::ReduceOp;

/// Rows of 3 elements that depend on rank and position.
at::Tensor rows_of(int64_t count, int rank, at::ScalarType type = at::kFloat) {
  return (at::arange(count * 3) + 100 * rank).view({count, 3}).to(type);
}

/// A further group of some ranks of the test.
ddp::ProcessGroup part_of(const Rank& self, const std::string& name, int rank, int size) {
  return ddp::make_process_group(
      ddp::ProcessGroupOptions()
          .backend("gloo")
          .store(c10::make_intrusive<c10d::PrefixStore>(name, self.store))
          .rank(rank)
          .world_size(size)
          .timeout(std::chrono::seconds(20)));
}

}  // namespace

TEST_CASE("hierarchical_all_reduce reduces over a grid", "[comm][ranks][many]") {
  const auto op = GENERATE(Op::SUM, Op::AVG, Op::MAX);
  const int64_t count = GENERATE(0, 1, 7);
  const auto results = run_ranks<std::vector<at::Tensor>>(4, [&](const Rank& self) {
    const int row = self.rank / 2;
    const int column = self.rank % 2;
    const auto inner = part_of(self, "row " + std::to_string(row), column, 2);
    const auto outer = part_of(self, "column " + std::to_string(column), row, 2);
    auto grid = rows_of(count, self.rank).t();  // not contiguous
    ddp::hierarchical_all_reduce(grid, inner, outer, op);
    auto flat = rows_of(count, self.rank).t();
    ddp::all_reduce(flat, op, self.group);
    return std::vector<at::Tensor>{grid, flat};
  });
  for (const auto& result : results) CHECK(at::equal(result[0], result[1]));
}

TEST_CASE("all_gather_into_tensor puts the ranks' inputs one after the other", "[comm][ranks]") {
  const int world = GENERATE(1, 2, 3);
  const auto type = GENERATE(at::kFloat, at::kDouble, at::kBool, at::kBFloat16);
  const auto results = run_ranks<std::vector<at::Tensor>>(world, [&](const Rank& self) {
    const auto input = rows_of(2, self.rank, type);
    auto joined = at::empty({2 * world, 3}, type);
    ddp::all_gather_into_tensor(joined, input, self.group);
    auto stacked = at::empty({3, 2, world}, type).permute({2, 1, 0});  // not contiguous
    ddp::all_gather_into_tensor_async(stacked, input, self.group)->wait();
    return std::vector<at::Tensor>{joined, stacked};
  });
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < world; ++rank) inputs.push_back(rows_of(2, rank, type));
  const auto expected = at::cat(inputs);
  for (const auto& result : results) {
    CHECK(at::equal(result[0], expected));
    CHECK(at::equal(result[1].reshape({-1, 3}), expected));
  }
}

TEST_CASE("reduce_scatter_tensor gives rank r the r-th part of the reduction", "[comm][ranks]") {
  const int world = GENERATE(1, 2, 3);
  const auto results = run_ranks<std::vector<at::Tensor>>(world, [&](const Rank& self) {
    const auto input = rows_of(2 * world, self.rank);
    auto sum = at::empty({2, 3});
    ddp::reduce_scatter_tensor(sum, input, Op::SUM, self.group);
    auto mean = at::empty({2, 3}, at::kDouble);
    ddp::reduce_scatter_tensor_async(mean, input.to(at::kDouble), Op::AVG, self.group)->wait();
    TORCH_CHECK(at::equal(input, rows_of(2 * world, self.rank)), "the input was written to");
    return std::vector<at::Tensor>{sum, mean};
  });
  auto whole = at::zeros({2 * world, 3});
  for (int rank = 0; rank < world; ++rank) whole += rows_of(2 * world, rank);
  for (int rank = 0; rank < world; ++rank) {
    CHECK(at::equal(results[rank][0], whole.narrow(0, 2 * rank, 2)));
    CHECK(at::allclose(results[rank][1], whole.narrow(0, 2 * rank, 2).to(at::kDouble) / world));
  }
}

TEST_CASE("all_to_all_single moves any dtype among any number of ranks", "[comm][ranks][many]") {
  const int world = GENERATE(1, 2, 3, 4);
  const auto type = GENERATE(
      at::kBool, at::kByte, at::kShort, at::kLong, at::kBFloat16, at::kDouble, at::kComplexDouble);
  const auto results = run_ranks<std::vector<at::Tensor>>(world, [&](const Rank& self) {
    // Rank s sends s + r rows to rank r.
    std::vector<int64_t> splits;
    for (int other = 0; other < world; ++other) splits.push_back(self.rank + other);
    int64_t rows = 0;
    for (const auto count : splits) rows += count;
    const auto input = rows_of(rows, self.rank, type);
    auto first = at::empty_like(input);
    const auto work = ddp::all_to_all_single_async(first, input, splits, splits, self.group);
    auto gathered = at::empty({world * rows_of(2, 0).size(0), 3}, type);
    ddp::all_gather_into_tensor(gathered, rows_of(2, self.rank, type), self.group);
    auto strided = at::empty({3, rows}, type).t();
    ddp::all_to_all_single(strided, input, splits, splits, self.group);
    work->wait();
    return std::vector<at::Tensor>{first, strided.contiguous()};
  });
  for (int rank = 0; rank < world; ++rank) {
    std::vector<at::Tensor> parts;
    for (int from = 0; from < world; ++from) {
      int64_t begin = 0;
      int64_t rows = 0;
      for (int other = 0; other < world; ++other) rows += from + other;
      for (int other = 0; other < rank; ++other) begin += from + other;
      parts.push_back(rows_of(rows, from, type).narrow(0, begin, from + rank));
    }
    for (const auto& result : results[rank]) CHECK(at::equal(result, at::cat(parts)));
  }
}

TEST_CASE("a part of another size than is expected is an error on every rank", "[comm][ranks]") {
  constexpr int kWorld = 3;
  const int64_t more = GENERATE(1, 300000);
  const auto errors = errors_of_ranks(kWorld, [&](const Rank& self) {
    // Rank 1 sends more than the others expect, and receives as much as they send.
    const int64_t sent = self.rank == 1 ? 2 + more : 2;
    std::vector<int64_t> sends(kWorld, sent);
    sends[static_cast<size_t>(self.rank)] = 2;
    const auto input = at::zeros({2 + (kWorld - 1) * sent, 3});
    auto output = at::zeros({2 * kWorld, 3});
    ddp::all_to_all_single(output, input, std::vector<int64_t>(kWorld, 2), sends, self.group);
    ddp::barrier(self.group);  // over Gloo rank 1 has all that it expects
  });
  CHECK_THAT(
      errors, Each(
                  Contains("expected every rank to receive as many elements as are sent to it") &&
                  Contains(ddp::str("rank 1 sends ", 3 * (2 + more), " to rank ")) &&
                  Contains("which expects 6")));
}

TEST_CASE("all_to_all_single exchanges equal and different numbers of rows", "[comm][ranks]") {
  constexpr int kWorld = 3;
  const auto results = run_ranks<std::vector<at::Tensor>>(kWorld, [&](const Rank& self) {
    const auto even = rows_of(2 * kWorld, self.rank);
    auto from_all = at::empty({2 * kWorld, 3});
    ddp::all_to_all_single(from_all, even, {}, {}, self.group);
    // Rank r sends as many rows as the receiver's number: none to rank 0.
    const auto uneven = rows_of(3, self.rank);
    auto received = at::empty({kWorld * self.rank, 3});
    ddp::all_to_all_single_async(
        received, uneven, std::vector<int64_t>(kWorld, self.rank), {0, 1, 2}, self.group)
        ->wait();
    return std::vector<at::Tensor>{from_all, received};
  });
  for (int rank = 0; rank < kWorld; ++rank) {
    std::vector<at::Tensor> even;
    std::vector<at::Tensor> uneven;
    for (int from = 0; from < kWorld; ++from) {
      even.push_back(rows_of(2 * kWorld, from).narrow(0, 2 * rank, 2));
      uneven.push_back(rows_of(3, from).narrow(0, rank == 2 ? 1 : 0, rank));
    }
    CHECK(at::equal(results[rank][0], at::cat(even)));
    CHECK(at::equal(results[rank][1], at::cat(uneven)));
  }
}

TEST_CASE("tensors without elements are exchanged, too", "[comm][ranks]") {
  const auto sizes = run_ranks<int64_t>(2, [](const Rank& self) {
    auto none = at::empty({0, 3});
    ddp::all_gather_into_tensor(none, at::empty({0, 3}), self.group);
    ddp::reduce_scatter_tensor(none, at::empty({0, 3}), Op::SUM, self.group);
    ddp::all_to_all_single(none, at::empty({0, 3}), {}, {}, self.group);
    return none.numel();
  });
  CHECK(sizes == std::vector<int64_t>{0, 0});
}

TEST_CASE("tensors that do not fit are refused before anything is sent", "[comm][ranks][errors]") {
  const auto texts = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    const auto& group = self.group;
    auto four = at::zeros({4});
    auto five = at::zeros({5});
    auto doubles = at::zeros({8}, at::kDouble);
    auto scalar = at::zeros({});
    const auto refused = [](const auto& call) { return error_of<c10::ValueError>(call); };
    std::vector<std::string> errors{
        refused([&] { ddp::all_gather_into_tensor(five, four, group); }),
        refused([&] { ddp::all_gather_into_tensor(doubles, four, group); }),
        refused([&] { ddp::reduce_scatter_tensor(four, five, Op::SUM, group); }),
        refused([&] { ddp::all_to_all_single(five, five, {}, {}, group); }),
        refused([&] {
          ddp::all_to_all_single(four, four, {1, 2}, {}, group);
        }),
        refused([&] {
          ddp::all_to_all_single(four, four, {5, -1}, {}, group);
        }),
        refused([&] { ddp::all_to_all_single(scalar, scalar, {}, {}, group); }),
        refused([&] {
          ddp::all_to_all_single(four, four, {1, 3}, {3, 1}, group);
        })};
    // The group still works.
    ddp::all_to_all_single(four, at::full({4}, 1.0), {}, {}, group);
    TORCH_CHECK(four.sum().item<float>() == 4);
    return errors;
  });
  const std::vector<std::string> expected{
      "expected output of 8 elements, those of input once for each rank, got 5 on rank",
      "expected output of dtype Float on cpu as input, got Double on cpu on rank",
      "expected input of 8 elements, those of output once for each rank, got 5 on rank",
      "as many rows for each of 2 ranks, got 5 on rank",
      "2 split sizes of at least 0 for output that add up to its 4 rows, got [1, 2] on rank",
      "got [5, -1] on rank",
      "with a first dimension to cut, got a scalar on rank",
      "as many of them from this rank as it sends to itself"};
  for (const auto& of_rank : texts) {
    for (size_t i = 0; i < expected.size(); ++i) CHECK_THAT(of_rank[i], ContainsText(expected[i]));
  }
}
