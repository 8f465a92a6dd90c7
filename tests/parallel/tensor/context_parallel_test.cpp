#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/live_bytes.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using ddp::ProcessGroup;
using namespace ddp::testing;
using torch::Tensor;
namespace functional = ddp::functional;

namespace {

using Attention = Tensor (*)(
    const Tensor&, const Tensor&, const Tensor&, const ddp::GroupArg&, bool, std::optional<double>);

}  // namespace

TEST_CASE("a sequence is cut into an early and a late piece a rank", "[parallel][context][ranks]") {
  const auto positions = run_ranks<std::vector<int64_t>>(3, [](const Rank& self) {
    const auto own = functional::context_positions(12, self.group);
    return std::vector<int64_t>(own.data_ptr<int64_t>(), own.data_ptr<int64_t>() + own.numel());
  });
  CHECK(positions[0] == std::vector<int64_t>{0, 1, 10, 11});
  CHECK(positions[1] == std::vector<int64_t>{2, 3, 8, 9});
  CHECK(positions[2] == std::vector<int64_t>{4, 5, 6, 7});

  const auto errors = run_ranks<double>(3, [](const Rank& self) {
    const auto x = draw_values({2, 12, 3}, 1).requires_grad_();
    const auto part = functional::context_shard(x, 1, self.group);
    const auto expected = x.index_select(1, functional::context_positions(12, self.group));
    const auto whole = functional::context_gather(part * 2, -2, self.group);
    (whole * draw_values({2, 12, 3}, 2)).sum().backward();
    return std::max(
        {difference(part, expected), difference(whole, x * 2),
         difference(x.grad(), draw_values({2, 12, 3}, 2) * 2)});
  });
  for (const double error : errors) CHECK(error == 0);
}

TEST_CASE(
    "attention over a cut sequence is attention over the whole", "[parallel][context][ranks]") {
  const int ranks = GENERATE(1, 2, 3, 4);
  const bool causal = GENERATE(false, true);
  const auto scale = GENERATE(std::optional<double>(), std::optional<double>(0.3));
  const auto attention = GENERATE(
      static_cast<Attention>(functional::ring_attention),
      static_cast<Attention>(functional::all_to_all_attention));
  const std::vector<int64_t> sizes{2, 12, 24, 5};
  std::vector<Tensor> whole;
  for (uint64_t seed : {1, 2, 3}) whole.push_back(draw_values(sizes, seed).requires_grad_());
  const auto weights = draw_values(sizes, 4);
  const auto output =
      at::scaled_dot_product_attention(whole[0], whole[1], whole[2], {}, 0, causal, scale);
  (output * weights).sum().backward();

  const auto errors = run_ranks<std::vector<double>>(ranks, [&](const Rank& self) {
    const auto cut = [&](const Tensor& t) {
      return functional::context_shard(t.detach(), 2, self.group).clone();
    };
    std::vector<Tensor> own;
    for (const auto& tensor : whole) own.push_back(cut(tensor).requires_grad_());
    const auto part = attention(own[0], own[1], own[2], self.group, causal, scale);
    (part * cut(weights)).sum().backward();
    std::vector<double> all{difference(part, cut(output))};
    for (size_t i = 0; i < own.size(); ++i)
      all.push_back(difference(own[i].grad(), cut(whole[i].grad())));
    return all;
  });
  for (const auto& by_rank : errors) {
    for (const double error : by_rank) CHECK(error < 1e-10);
  }
}

TEST_CASE("ring attention needs memory for a part of the sequence", "[parallel][context][ranks]") {
  const auto bytes_of_a_rank = [](int ranks) {
    const auto part = draw_values({1, 4, 64, 32}, 1);
    const PeakOfAllThreads peak;
    run_ranks<int>(ranks, [&](const Rank& self) {
      const torch::NoGradGuard no_grad;
      ddp::barrier(self.group);
      const auto result = functional::ring_attention(part, part, part, self.group, true);
      ddp::barrier(self.group);  // all results exist at once
      return static_cast<int>(result.dim());
    });
    return static_cast<double>(peak.bytes()) / ranks;
  };
  CHECK(bytes_of_a_rank(8) < 1.6 * bytes_of_a_rank(2));
}

TEST_CASE("attention over a cut sequence works in bfloat16", "[parallel][context][ranks]") {
  const std::vector<int64_t> sizes{1, 2, 16, 8};
  const auto q = draw_values(sizes, 1, torch::kBFloat16),
             k = draw_values(sizes, 2, torch::kBFloat16),
             v = draw_values(sizes, 3, torch::kBFloat16);
  const auto expected = at::scaled_dot_product_attention(
      q.to(torch::kDouble), k.to(torch::kDouble), v.to(torch::kDouble), {}, 0, true);
  const auto errors = run_ranks<double>(2, [&](const Rank& self) {
    const auto cut = [&](const Tensor& t) { return functional::context_shard(t, 2, self.group); };
    const auto own_q = cut(q).clone().requires_grad_();
    const auto part = functional::ring_attention(own_q, cut(k), cut(v), self.group, true);
    part.sum().backward();
    if (part.scalar_type() != torch::kBFloat16 || own_q.grad().scalar_type() != torch::kBFloat16) {
      return 1e300;
    }
    return difference(part.to(torch::kDouble), cut(expected));
  });
  for (const double error : errors) CHECK(error < 0.03);
}

TEST_CASE(
    "attention over a cut sequence takes any layout and autocast", "[parallel][context][ranks]") {
  const auto q = draw_values({2, 4, 5, 16}, 1).transpose(-1, -2);  // [2, 4, 16, 5]
  const auto k = draw_values({2, 4, 16, 5}, 2), v = draw_values({2, 4, 16, 5}, 3);
  const auto expected = at::scaled_dot_product_attention(q, k, v, {}, 0, true);
  const auto errors = run_ranks<double>(2, [&](const Rank& self) {
    const auto cut = [&](const Tensor& t) { return t.chunk(2, 2)[static_cast<size_t>(self.rank)]; };
    // Whole sequences in the order of the ranks: the first half, which is causal by itself.
    const auto positions = functional::context_positions(16, self.group);
    const auto own = [&](const Tensor& t) { return t.index_select(2, positions); };
    const auto own_q = own(q).transpose(-1, -2).contiguous().transpose(-1, -2);
    const auto part = functional::ring_attention(own_q, own(k), own(v), self.group, true);
    const ddp::AutocastGuard autocast(at::kCPU, ddp::AutocastOptions(at::kBFloat16));
    const auto low = functional::ring_attention(
        cut(q).to(torch::kFloat), cut(k).to(torch::kFloat), cut(v).to(torch::kBFloat16),
        self.group);
    return low.scalar_type() == torch::kBFloat16 ? difference(part, own(expected)) : 1e300;
  });
  for (const double error : errors) CHECK(error < 1e-12);
}

TEST_CASE(
    "attention over a cut sequence refuses what does not fit",
    "[parallel][context][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    const auto of = [&](const std::function<void()>& call) { return error_of<c10::Error>(call); };
    const auto& g = self.group;
    const auto t = torch::zeros({1, 3, 4, 2});
    const auto again = [&] {
      const auto q = torch::ones({1, 2, 4, 2}).requires_grad_();
      const auto gradient = torch::autograd::grad(
          {functional::ring_attention(q, q, q, g).sum()}, {q}, {}, true, true);
    };
    return std::vector<std::string>{
        of([&] { functional::context_shard(torch::zeros({6}), 0, g); }),
        of([&] { functional::context_positions(10, g); }),
        of([&] { functional::context_shard(torch::zeros({8}), 1, g); }),
        of([&] {
          functional::ring_attention(t, t, torch::zeros({1, 3, 5, 2}), g);
        }),
        of([&] { functional::all_to_all_attention(t, t, t, g); }),
        of([&] {
          functional::ring_attention(
              t.narrow(2, 0, 3), t.narrow(2, 0, 3), t.narrow(2, 0, 3), g, true);
        }),
        of(again)};
  });
  const std::vector<std::string> texts{
      "context_shard: expected a length that is a multiple of 4, got 6",
      "context_positions: expected a length that is a multiple of 4, got 10",
      "context_shard: expected a dimension of the tensor, got 1",
      "got [1, 3, 4, 2], [1, 3, 4, 2] and [1, 3, 5, 2]",
      "expected heads that are a multiple of the group's 2 ranks, got [1, 3, 4, 2]",
      "expected an even number of positions",
      "ring_attention: expected a backward pass without create_graph"};
  for (const auto& by_rank : errors) {
    for (size_t i = 0; i < texts.size(); ++i) CHECK_THAT(by_rank[i], Contains(texts[i]));
  }
}
