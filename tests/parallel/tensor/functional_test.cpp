#include <functional>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using ddp::ProcessGroup;
using namespace ddp::testing;
using torch::Tensor;
namespace functional = ddp::functional;

namespace {

/// This rank's part of `t` along `dim`.
Tensor part(const Tensor& t, int64_t dim, const Rank& self) {
  return t.chunk(self.size, dim)[static_cast<size_t>(self.rank)];
}

/// How far a function of one rank is from what it is when one process computes it for all ranks.
struct Pair {
  const char* name;
  /// The function.
  std::function<Tensor(const Tensor&, const ProcessGroup&)> of_rank;
  /// This rank's result, of the inputs of all ranks.
  std::function<Tensor(const std::vector<Tensor>&, int rank)> of_all;
  /// Whether all ranks have the same input.
  bool same_input;
  /// Whether all ranks have, and use in the same way, the same result.
  bool same_result;
};

const int64_t kRows = 6, kColumns = 12;

const std::vector<Pair>& pairs() {
  using Inputs = std::vector<Tensor>;
  const auto sum_of = [](const Inputs& inputs) {
    auto sum = inputs[0];
    for (size_t i = 1; i < inputs.size(); ++i) sum = sum + inputs[i];
    return sum;
  };
  static const std::vector<Pair> all{
      {"copy_to_region",
       [](const Tensor& t, const ProcessGroup& g) { return functional::copy_to_region(t, g); },
       [](const Inputs& inputs, int rank) { return inputs[static_cast<size_t>(rank)]; }, true,
       false},
      {"reduce_from_region",
       [](const Tensor& t, const ProcessGroup& g) { return functional::reduce_from_region(t, g); },
       [=](const Inputs& inputs, int) { return sum_of(inputs); }, false, true},
      {"scatter_to_region",
       [](const Tensor& t, const ProcessGroup& g) { return functional::scatter_to_region(t, g); },
       [](const Inputs& inputs, int rank) {
         return inputs[static_cast<size_t>(rank)].chunk(
             static_cast<int64_t>(inputs.size()), -1)[static_cast<size_t>(rank)];
       },
       true, false},
      {"scatter_to_region of rows",
       [](const Tensor& t, const ProcessGroup& g) {
         return functional::scatter_to_region(t, g, 0);
       },
       [](const Inputs& inputs, int rank) {
         return inputs[static_cast<size_t>(rank)].chunk(
             static_cast<int64_t>(inputs.size()), 0)[static_cast<size_t>(rank)];
       },
       true, false},
      {"gather_from_region",
       [](const Tensor& t, const ProcessGroup& g) { return functional::gather_from_region(t, g); },
       [](const Inputs& inputs, int) { return torch::cat(inputs, -1); }, false, true},
      {"all_gather of rows",
       [](const Tensor& t, const ProcessGroup& g) { return functional::all_gather(t, 0, g); },
       [](const Inputs& inputs, int) { return torch::cat(inputs, 0); }, false, false},
      {"all_gather of columns",
       [](const Tensor& t, const ProcessGroup& g) { return functional::all_gather(t, 1, g); },
       [](const Inputs& inputs, int) { return torch::cat(inputs, 1); }, false, false},
      {"reduce_scatter of rows",
       [](const Tensor& t, const ProcessGroup& g) { return functional::reduce_scatter(t, 0, g); },
       [=](const Inputs& inputs, int rank) {
         return sum_of(inputs).chunk(
             static_cast<int64_t>(inputs.size()), 0)[static_cast<size_t>(rank)];
       },
       false, false},
      {"reduce_scatter of columns",
       [](const Tensor& t, const ProcessGroup& g) { return functional::reduce_scatter(t, -1, g); },
       [=](const Inputs& inputs, int rank) {
         return sum_of(inputs).chunk(
             static_cast<int64_t>(inputs.size()), 1)[static_cast<size_t>(rank)];
       },
       false, false},
      {"all_to_all",
       [](const Tensor& t, const ProcessGroup& g) { return functional::all_to_all(t, {}, {}, g); },
       [](const Inputs& inputs, int rank) {
         Inputs rows;
         for (const auto& input : inputs)
           rows.push_back(
               input.chunk(static_cast<int64_t>(inputs.size()), 0)[static_cast<size_t>(rank)]);
         return torch::cat(rows, 0);
       },
       false, false},
      {"all_to_all with splits",
       [](const Tensor& t, const ProcessGroup& g) {
         // Each rank sends all rows but one to rank 0, and one to the last.
         const auto ranks = static_cast<size_t>(g->getSize());
         std::vector<int64_t> to(ranks, 0), from(ranks, 0);
         to.front() = kRows - 1;
         to.back() += 1;
         if (g->getRank() == 0) from.assign(ranks, kRows - 1);
         if (g->getRank() + 1 == g->getSize())
           for (auto& rows : from) rows += 1;
         return functional::all_to_all(t, to, from, g);
       },
       [](const Inputs& inputs, int rank) {
         Inputs rows;
         const bool last = rank + 1 == static_cast<int>(inputs.size());
         for (const auto& input : inputs) {
           if (rank == 0)
             rows.push_back(input.narrow(0, 0, kRows - 1));
           else
             rows.push_back(input.narrow(0, last ? kRows - 1 : 0, last ? 1 : 0));
         }
         return torch::cat(rows, 0);
       },
       false, false}};
  return all;
}

/// The loss of one rank's result. Its second derivative is not zero.
Tensor loss_of(const Tensor& result, bool same_result, int rank) {
  const uint64_t seed = same_result ? 100 : 100 + static_cast<uint64_t>(rank);
  return (draw_values(result.sizes().vec(), seed) * result * result).sum();
}

/// A gradient and a gradient of a function of it, by input.
struct Gradients {
  Tensor result, first, second;
};

std::vector<Gradients> expected(const Pair& pair, int ranks) {
  std::vector<Tensor> inputs;
  Tensor same;
  for (int rank = 0; rank < ranks; ++rank) {
    if (!pair.same_input || rank == 0)
      same = draw_values({kRows, kColumns}, 1 + static_cast<uint64_t>(rank)).requires_grad_();
    inputs.push_back(same);
  }
  std::vector<Tensor> results;
  auto loss = torch::zeros({}, torch::kDouble);
  for (int rank = 0; rank < ranks; ++rank) {
    results.push_back(pair.of_all(inputs, rank));
    if (!pair.same_result || rank == 0)
      loss = loss + loss_of(results.back(), pair.same_result, rank);
  }
  std::vector<Tensor> of(inputs.begin(), inputs.begin() + (pair.same_input ? 1 : ranks));
  const auto first = torch::autograd::grad({loss}, of, {}, true, true);
  auto penalty = torch::zeros({}, torch::kDouble);
  for (const auto& gradient : first) penalty = penalty + (gradient * gradient * gradient).sum();
  const auto second = torch::autograd::grad({penalty}, of);
  std::vector<Gradients> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const size_t i = pair.same_input ? 0 : static_cast<size_t>(rank);
    all.push_back(
        {results[static_cast<size_t>(rank)].detach(), first[i].detach(), second[i].detach()});
  }
  return all;
}

}  // namespace

TEST_CASE(
    "differentiable collectives have the gradients of one process",
    "[parallel][functional][ranks]") {
  const int ranks = GENERATE(2, 3);
  for (const auto& pair : pairs()) {
    INFO(pair.name << " on " << ranks << " ranks");
    const auto of_all = expected(pair, ranks);
    const auto errors = run_ranks<std::vector<double>>(ranks, [&](const Rank& self) {
      const uint64_t seed = pair.same_input ? 1 : 1 + static_cast<uint64_t>(self.rank);
      const auto input = draw_values({kRows, kColumns}, seed).requires_grad_();
      const auto result = pair.of_rank(input, self.group);
      const auto loss = loss_of(result, pair.same_result, self.rank);
      const auto first = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
      const auto second = torch::autograd::grad({(first * first * first).sum()}, {input})[0];
      const auto& right = of_all[static_cast<size_t>(self.rank)];
      return std::vector<double>{
          difference(result, right.result), difference(first, right.first),
          difference(second, right.second)};
    });
    for (const auto& by_rank : errors) {
      CHECK(by_rank[0] < 1e-12);
      CHECK(by_rank[1] < 1e-12);
      CHECK(by_rank[2] < 1e-9);  // of values around 1e3
    }
  }
}

TEST_CASE("a group of one has no exchange", "[parallel][functional][ranks]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    const auto input = draw_values({kRows, kColumns}, 1).requires_grad_();
    for (const auto& pair : pairs()) {
      if (std::string(pair.name) == "all_to_all with splits") continue;
      if (!pair.of_rank(input, self.group).is_same(input)) return pair.name;
    }
    return "";
  });
  CHECK(faults[0].empty());
}

TEST_CASE("results may be changed in place", "[parallel][functional][ranks]") {
  const auto errors = run_ranks<double>(2, [](const Rank& self) {
    double worst = 0;
    for (const auto& pair : pairs()) {
      const auto value = draw_values({kRows, kColumns}, 1);
      const auto input = value.clone().requires_grad_();
      const auto other = value.clone().requires_grad_();
      pair.of_rank(input * 1, self.group).relu_().sum().backward();
      pair.of_rank(other * 1, self.group).relu().sum().backward();
      worst = std::max(worst, difference(input.grad(), other.grad()));
    }
    return worst;
  });
  for (const double error : errors) CHECK(error == 0);
}

TEST_CASE("inputs that need no gradient make no node", "[parallel][functional][ranks]") {
  const auto nodes = run_ranks<int>(2, [](const Rank& self) {
    int nodes = 0;
    const auto plain = draw_values({kRows, kColumns}, 1);
    const auto trained = plain.clone().requires_grad_();
    for (const auto& pair : pairs()) {
      nodes += pair.of_rank(plain, self.group).requires_grad();
      const torch::NoGradGuard no_grad;
      nodes += pair.of_rank(trained, self.group).requires_grad();
    }
    return nodes;
  });
  for (const int count : nodes) CHECK(count == 0);
}

TEST_CASE(
    "a gradient that one rank alone needs is an error that says so",
    "[parallel][functional][ranks][errors]") {
  const auto errors = errors_of_ranks(3, kLongTimeout, [](const Rank& self) {
    const auto pair = ddp::new_group({1, 2}, self.group);
    if (!pair) return self.wait_until_others_end();
    const auto input = draw_values({4}, 1).requires_grad_(self.rank == 1);
    const auto weight = draw_values({4}, 2).requires_grad_();
    (functional::copy_to_region(input, pair) * weight).sum().backward();
    ddp::barrier(pair);
  });
  for (size_t rank : {1, 2}) {
    CHECK_THAT(
        errors[rank], Contains("differentiable call of 4 x Double that requires a gradient") &&
                          Contains("differentiable call of 4 x Double that requires no gradient"));
  }
}

TEST_CASE(
    "parts behind a dimension of size 1 may be changed in place", "[parallel][functional][ranks]") {
  const auto sums = run_ranks<double>(2, [](const Rank& self) {
    const auto input = torch::full({1, 3}, -1.0, torch::kDouble).requires_grad_();
    return functional::all_gather(input * 1, 1, self.group).relu_().sum().item<double>();
  });
  CHECK(sums == std::vector<double>{0, 0});
}

TEST_CASE(
    "differentiable collectives refuse what does not fit",
    "[parallel][functional][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    const auto t = torch::ones({3, 4});
    const auto of = [&](const std::function<void()>& call) {
      return error_of<c10::ValueError>(call);
    };
    return std::vector<std::string>{
        of([&] { functional::scatter_to_region(t, self.group, 0); }),
        of([&] { functional::reduce_scatter(t, 2, self.group); }),
        of([&] { functional::all_gather(torch::ones({}), 0, self.group); }),
        of([&] { functional::copy_to_region(Tensor(), self.group); }),
        of([&] { functional::all_to_all(t, {3}, {3}, self.group); }),
        of([&] {
          functional::all_to_all(t, {1, 1}, {1, 1}, self.group);
        }),
        of([&] {
          functional::all_to_all(t, {1, 2}, {}, self.group);
        }),
        of([&] {
          functional::all_to_all(t, {4, -1}, {1, 2}, self.group);
        }),
        of([&] { functional::all_to_all(t, {}, {}, self.group); })};
  });
  const std::vector<std::string> texts{
      "scatter_to_region: expected dimension 0 to be a multiple of the group's 2 ranks, got [3, 4]",
      "functional::reduce_scatter: expected a dimension of a tensor with 2, got 2",
      "functional::all_gather: expected a dimension of a tensor with 0, got 0",
      "copy_to_region: expected a tensor, got an undefined one",
      "expected input_splits of one number of rows for each of the 2 ranks, got [3]",
      "expected input_splits whose sum is the 3 rows of [3, 4], got [1, 1]",
      "expected both splits or none",
      "got [4, -1]",
      "functional::all_to_all: expected dimension 0 to be a multiple of the group's 2 ranks"};
  for (const auto& by_rank : errors) {
    for (size_t i = 0; i < texts.size(); ++i) CHECK_THAT(by_rank[i], Contains(texts[i]));
  }
}

TEST_CASE(
    "a gradient penalty goes through column and row layers", "[parallel][functional][ranks]") {
  const int64_t batch = 5, width = 4, hidden = 12;
  const auto x = draw_values({batch, width}, 1), up = draw_values({hidden, width}, 2),
             down = draw_values({width, hidden}, 3);
  const auto penalized = [](const Tensor& loss, const Tensor& input) {
    const auto gradient = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
    return loss + gradient.pow(2).sum();
  };
  const auto whole = [&] {
    const auto input = x.clone().requires_grad_();
    const auto w1 = up.clone().requires_grad_(), w2 = down.clone().requires_grad_();
    const auto y = torch::linear(torch::tanh(torch::linear(input, w1)), w2);
    penalized(y.pow(3).mean(), input).backward();
    return std::vector<Tensor>{w1.grad(), w2.grad(), input.grad()};
  }();
  const auto errors = run_ranks<double>(3, [&](const Rank& self) {
    const auto input = x.clone().requires_grad_();
    const auto w1 = part(up, 0, self).clone().requires_grad_();
    const auto w2 = part(down, 1, self).clone().requires_grad_();
    const auto inside = functional::copy_to_region(input, self.group);
    const auto y = functional::reduce_from_region(
        torch::linear(torch::tanh(torch::linear(inside, w1)), w2), self.group);
    penalized(y.pow(3).mean(), input).backward();
    return std::max(
        {difference(w1.grad(), part(whole[0], 0, self)),
         difference(w2.grad(), part(whole[1], 1, self)), difference(input.grad(), whole[2])});
  });
  for (const double error : errors) CHECK(error < 1e-11);
}
