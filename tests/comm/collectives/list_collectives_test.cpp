#include <ddp/collectives.h>

#include <ATen/ATen.h>

#include "comm/tensors.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using c10d::ReduceOp;
using namespace ddp::testing;
using Tensors = std::vector<at::Tensor>;

namespace {

/// Rank r's share in the uneven tests: r + 1 rows.
at::Tensor rows(int count, double value) { return at::full({count, 2}, value); }

Tensors list_of(int size, const std::function<at::Tensor(int)>& make) {
  Tensors tensors;
  for (int i = 0; i < size; ++i) tensors.push_back(make(i));
  return tensors;
}

}  // namespace

TEST_CASE("all_gather gives every rank all inputs", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kBool, at::kComplexFloat, at::kShort, at::kLong);
  CAPTURE(size, dtype);
  const auto results = run_ranks<Tensors>(size, [&](const Rank& self) {
    // Inputs and outputs are strided.
    auto outputs = list_of(self.size, [&](int) { return strided(filled(0, dtype)); });
    ddp::all_gather(outputs, strided(filled(self.rank, dtype)), self.group);
    return outputs;
  });
  for (const auto& outputs : results) {
    for (int rank = 0; rank < size; ++rank) CHECK(at::equal(outputs[rank], filled(rank, dtype)));
  }
}

TEST_CASE("all_gather takes inputs of different sizes", "[comm][ranks]") {
  const int size = GENERATE(2, 3);
  const auto results = run_ranks<Tensors>(size, [](const Rank& self) {
    auto outputs = list_of(self.size, [](int rank) { return rows(rank + 1, -1); });
    ddp::all_gather(outputs, rows(self.rank + 1, self.rank), self.group);
    return outputs;
  });
  for (const auto& outputs : results) {
    for (int rank = 0; rank < size; ++rank) CHECK(at::equal(outputs[rank], rows(rank + 1, rank)));
  }
}

TEST_CASE("gather gives dst all inputs", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kBool, at::kComplexFloat);
  const int dst = size - 1;
  CAPTURE(size, dtype);
  const auto results = run_ranks<Tensors>(size, [&](const Rank& self) {
    Tensors outputs;
    if (self.rank == dst) {
      outputs = list_of(self.size, [&](int) { return strided(filled(0, dtype)); });
    }
    ddp::gather(outputs, filled(self.rank, dtype), dst, self.group);
    return outputs;
  });
  for (int rank = 0; rank < size; ++rank) {
    CHECK(at::equal(results[dst][rank], filled(rank, dtype)));
    CHECK((rank == dst || results[rank].empty()));
  }
}

TEST_CASE("scatter gives each rank one tensor of src", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kBool, at::kComplexFloat);
  const int src = size - 1;
  CAPTURE(size, dtype);
  const auto results = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    Tensors inputs;
    if (self.rank == src) {
      inputs = list_of(self.size, [&](int rank) { return strided(filled(rank, dtype)); });
    }
    auto output = strided(filled(0, dtype));
    ddp::scatter(output, inputs, src, self.group);
    return output;
  });
  for (int rank = 0; rank < size; ++rank) CHECK(at::equal(results[rank], filled(rank, dtype)));
}

TEST_CASE("reduce_scatter gives rank r the r-th reduction", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto op = GENERATE(ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX);
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  CAPTURE(size, static_cast<int>(op));
  const auto results = run_ranks<Tensors>(size, [&](const Rank& self) {
    // Rank r gives r + 10 i for rank i.
    auto inputs =
        list_of(self.size, [&](int rank) { return strided(filled(self.rank + 10 * rank, dtype)); });
    auto output = strided(filled(0, dtype));
    ddp::reduce_scatter(output, inputs, op, self.group);
    inputs.push_back(output);
    return inputs;
  });
  for (int rank = 0; rank < size; ++rank) {
    const double sum = size * (size - 1) / 2.0 + 10.0 * rank * size;
    const double expected = op == ReduceOp::SUM   ? sum
                            : op == ReduceOp::AVG ? sum / size
                                                  : size - 1 + 10.0 * rank;
    CHECK(at::equal(results[rank].back(), filled(expected, dtype)));
    for (int other = 0; other < size; ++other) {
      CHECK(at::equal(results[rank][other], filled(rank + 10 * other, dtype)));
    }
  }
}

TEST_CASE("reduce_scatter adds up complex numbers and takes different sizes", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto results = run_ranks<at::Tensor>(size, [](const Rank& self) {
    const auto inputs = list_of(self.size, [&](int rank) {
      return at::complex(rows(rank + 1, self.rank), rows(rank + 1, rank));
    });
    auto output = at::zeros({self.rank + 1, 2}, at::kComplexFloat);
    ddp::reduce_scatter(output, inputs, ReduceOp::SUM, self.group);
    return output;
  });
  for (int rank = 0; rank < size; ++rank) {
    const auto expected =
        at::complex(rows(rank + 1, size * (size - 1) / 2.0), rows(rank + 1, size * rank));
    CHECK(at::equal(results[rank], expected));
  }
}

TEST_CASE("all_to_all transposes the ranks' tensors", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const auto dtype = GENERATE(at::kFloat, at::kBool, at::kComplexFloat, at::kShort);
  CAPTURE(size, dtype);
  const auto value = [](int from, int to) { return 10 * from + to; };
  const auto results = run_ranks<Tensors>(size, [&](const Rank& self) {
    const auto inputs =
        list_of(self.size, [&](int to) { return strided(filled(value(self.rank, to), dtype)); });
    auto outputs = list_of(self.size, [&](int) { return strided(filled(0, dtype)); });
    ddp::all_to_all(outputs, inputs, self.group);
    return outputs;
  });
  for (int rank = 0; rank < size; ++rank) {
    for (int from = 0; from < size; ++from) {
      CHECK(at::equal(results[rank][from], filled(value(from, rank), dtype)));
    }
  }
}

TEST_CASE("all_to_all takes different sizes, also zero", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  // Rank r sends r * i rows to rank i.
  const auto results = run_ranks<Tensors>(size, [](const Rank& self) {
    const auto inputs = list_of(self.size, [&](int to) { return rows(self.rank * to, self.rank); });
    auto outputs = list_of(self.size, [&](int from) { return rows(from * self.rank, -1); });
    ddp::all_to_all(outputs, inputs, self.group);
    return outputs;
  });
  for (int rank = 0; rank < size; ++rank) {
    for (int from = 0; from < size; ++from) {
      CHECK(at::equal(results[rank][from], rows(from * rank, from)));
    }
  }
}

TEST_CASE("several collectives may be pending at the same time", "[comm][ranks]") {
  const auto results = run_ranks<Tensors>(3, [](const Rank& self) {
    auto gathered = list_of(self.size, [](int rank) { return rows(rank + 1, -1); });
    auto exchanged = list_of(self.size, [](int) { return filled(-1); });
    const auto inputs = list_of(self.size, [&](int) { return filled(self.rank); });
    auto scattered = filled(-1);
    const auto one = ddp::all_gather_async(gathered, rows(self.rank + 1, self.rank), self.group);
    const auto two = ddp::all_to_all_async(exchanged, inputs, self.group);
    const auto three = ddp::reduce_scatter_async(scattered, inputs, ReduceOp::SUM, self.group);
    three->wait();
    one->getFuture()->wait();
    while (!two->isCompleted()) std::this_thread::yield();
    return Tensors{gathered[2], exchanged[1], scattered};
  });
  for (const auto& result : results) {
    CHECK(at::equal(result[0], rows(3, 2)));
    CHECK(at::equal(result[1], filled(1)));
    CHECK(at::equal(result[2], filled(3)));
  }
}

TEST_CASE("bad lists are errors before anything is sent", "[comm][ranks][errors]") {
  using Call = std::function<void(const ddp::ProcessGroup&)>;
  const auto two = [](const at::Tensor& a, const at::Tensor& b) { return Tensors{a, b}; };
  const auto [call, message] = GENERATE_COPY(table<Call, std::string>({
      {[=](const auto& group) {
         Tensors out{filled(0)};
         ddp::all_gather(out, filled(0), group);
       },
       "all_gather: expected one tensor per rank in outputs, which is 2, got 1"},
      {[=](const auto& group) {
         auto out = two(filled(0), filled(0, at::kInt));
         ddp::all_gather(out, filled(0), group);
       },
       "all_gather: expected outputs[1] to be Float on cpu like the rest, got Int on cpu"},
      {[=](const auto& group) {
         auto out = two(rows(1, 0), rows(1, 0));
         ddp::all_gather(out, filled(0), group);
       },
       "of shape [2, 3], got [1, 2]"},
      {[=](const auto& group) {
         auto out = group->getRank() == 0 ? Tensors{filled(0)} : Tensors{};
         if (group->getRank() == 1) out.push_back(filled(0));
         ddp::gather(out, filled(0), 0, group);
       },
       "gather: expected "},
      {[=](const auto& group) {
         auto out = two(filled(0), filled(0));
         ddp::scatter(out[0], group->getRank() == 0 ? Tensors{} : out, 0, group);
       },
       "scatter: expected "},
      {[=](const auto& group) {
         auto out = filled(0);
         ddp::reduce_scatter(out, two(rows(1, 0), rows(1, 0)), ReduceOp::SUM, group);
       },
       "reduce_scatter: expected inputs["},
      {[=](const auto& group) {
         auto out = two(filled(0), filled(0));
         ddp::all_to_all(out, {}, group);
       },
       "all_to_all: expected one tensor per rank in inputs, got none"},
      {[=](const auto& group) {
         auto out = two(rows(1, 0), rows(1, 0));
         ddp::all_to_all(out, two(filled(0), filled(0)), group);
       },
       "of 6 elements, which inputs["},
  }));
  CAPTURE(message);
  const auto errors = errors_of_ranks(2, [call = call](const Rank& self) {
    const auto error = error_of<c10::ValueError>([&] { call(self.group); });
    auto tensor = filled(1);
    ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
    TORCH_CHECK(at::equal(tensor, filled(2)), "out of step");
    TORCH_CHECK(false, error);
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        errors[rank],
        ContainsText(message) && ContainsText(" on rank " + std::to_string(rank) + " of 2. "));
  }
}
