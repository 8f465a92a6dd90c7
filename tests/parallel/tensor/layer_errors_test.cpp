// What cut layers say to input that does not fit: subject, rule, value, rank and remedy.
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;

namespace {

using Call = std::function<void()>;
/// A call, and the begin of its error.
using BadCalls = std::vector<std::pair<std::string, Call>>;

/// Layers of 4 features on 2 ranks.
struct Layers {
  explicit Layers(const ddp::ProcessGroup& ranks)
      : group(ranks),
        column(ddp::ColumnParallelLinearOptions(4, 4).process_group(group), weight, bias),
        row(ddp::RowParallelLinearOptions(4, 4).process_group(group), weight, bias),
        table(ddp::VocabParallelEmbeddingOptions(4, 4).process_group(group), weight),
        attention(
            ddp::ParallelMultiheadAttentionOptions(4, 2).process_group(group),
            torch::nn::MultiheadAttention(4, 2)) {}

  ddp::ProcessGroup group;
  torch::Tensor weight = torch::zeros({4, 4}), bias = torch::zeros({4});
  ddp::ColumnParallelLinear column;
  ddp::RowParallelLinear row;
  ddp::VocabParallelEmbedding table;
  ddp::ParallelMultiheadAttention attention;
};

BadCalls bad_values(const Layers& on) {
  const auto& group = on.group;
  const auto column = ddp::ColumnParallelLinearOptions(4, 4).process_group(group);
  const auto row = ddp::RowParallelLinearOptions(4, 4).process_group(group);
  const auto table = ddp::VocabParallelEmbeddingOptions(5, 4).process_group(group);
  const auto attention = ddp::ParallelMultiheadAttentionOptions(4, 2).process_group(group);
  const auto whole = [](int64_t heads, bool bias) {
    return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(4, heads).bias(bias));
  };
  const auto no_bias = [](auto options) { return options.bias(false); };
  const auto weight = on.weight;
  const auto bias = on.bias;
  const torch::Tensor none;
  return {
      {"ColumnParallelLinear: expected a whole weight of sizes [4, 4], got [2, 4]",
       [=] { ddp::ColumnParallelLinear(column, weight.narrow(0, 0, 2), bias); }},
      {"ColumnParallelLinear: expected a whole bias of sizes [4], got []",
       [=] { ddp::ColumnParallelLinear(column, weight, none); }},
      {"ColumnParallelLinear: expected no bias with bias(false), got one of sizes [4]",
       [=] { ddp::ColumnParallelLinear(no_bias(column), weight, bias); }},
      {"RowParallelLinear: expected a whole weight of sizes [4, 4], got []",
       [=] { ddp::RowParallelLinear(row, none, bias); }},
      {"RowParallelLinear: expected a whole bias of sizes [4], got [4, 4]",
       [=] { ddp::RowParallelLinear(row, weight, weight); }},
      {"RowParallelLinear: expected no bias with bias(false), got one of sizes [4]",
       [=] { ddp::RowParallelLinear(no_bias(row), weight, bias); }},
      {"VocabParallelEmbedding: expected a whole weight of sizes [5, 4], got [4, 4]",
       [=] { ddp::VocabParallelEmbedding(table, weight); }},
      {"ParallelMultiheadAttention: expected a whole one of embed_dim 4 and num_heads 2",
       [=] { ddp::ParallelMultiheadAttention(attention, whole(4, true)); }},
      {"ColumnParallelLinear: expected a whole bias of sizes [12], got []",
       [=] { ddp::ParallelMultiheadAttention(attention, whole(2, false)); }},
      {"ColumnParallelLinear: expected no bias with bias(false), got one of sizes [12]",
       [=] { ddp::ParallelMultiheadAttention(no_bias(attention), whole(2, true)); }}};
}

BadCalls bad_inputs(Layers& on) {
  const auto loss = [&](const torch::Tensor& logits, const torch::Tensor& target) {
    return [&on, logits, target] { ddp::vocab_parallel_cross_entropy(logits, target, on.group); };
  };
  const auto logits = torch::zeros({3, 2}), target = torch::zeros({3}, torch::kLong);
  const torch::Tensor none;
  return {
      {"ColumnParallelLinear: expected an input [..., 4], got [2, 3]",
       [&] {
         on.column(torch::zeros({2, 3}));
       }},
      {"ColumnParallelLinear: expected an input [..., 4], got an undefined one",
       [&] { on.column(torch::Tensor()); }},
      {"RowParallelLinear: expected an input [..., 2], got [3, 4]",
       [&] {
         on.row(torch::zeros({3, 4}));
       }},
      {"RowParallelLinear: expected an input [..., 2], got an undefined one",
       [&] { on.row(torch::Tensor()); }},
      {"RowParallelLinear: expected an input [..., 2], got []", [&] { on.row(torch::zeros({})); }},
      {"VocabParallelEmbedding: expected numbers of tokens, int64 or int32, got an undefined one",
       [&] { on.table(torch::Tensor()); }},
      {"VocabParallelEmbedding: expected numbers of tokens, int64 or int32, got Float",
       [&] { on.table(torch::zeros({3})); }},
      {"ParallelMultiheadAttention: expected an input [T, N, 4], got [3, 4]",
       [&] {
         on.attention(torch::zeros({3, 4}));
       }},
      {"ParallelMultiheadAttention: expected an input [T, N, 4], got [3, 1, 6]",
       [&] {
         on.attention(torch::zeros({3, 1, 6}));
       }},
      {"ParallelMultiheadAttention: expected an input [T, N, 4], got an undefined one",
       [&] { on.attention(torch::Tensor()); }},
      {"vocab_parallel_cross_entropy: expected logits [..., classes] and a target [...], got "
       "[3, 2] and [2]",
       loss(logits, target.narrow(0, 0, 2))},
      {"vocab_parallel_cross_entropy: expected logits [..., classes] and a target [...], got an "
       "undefined one",
       loss(none, target)},
      {"vocab_parallel_cross_entropy: expected logits [..., classes] and a target [...], got "
       "[3, 2] and an undefined one",
       loss(logits, none)},
      {"vocab_parallel_cross_entropy: expected a target of int64, got Float",
       loss(logits, target.to(torch::kFloat))}};
}

/// Checks that each call throws its error on the rank, with a remedy after the place.
std::string fault_of(const BadCalls& calls, const Rank& self) {
  const auto place = " on rank " + std::to_string(self.rank) + " of 2. ";
  for (const auto& [text, call] : calls) {
    const auto error = error_of<c10::ValueError>(call);
    const auto at = error.find(place);
    const bool has_remedy = at != std::string::npos && error.size() > at + place.size() + 5;
    if (error.rfind(text, 0) != 0 || !has_remedy) return text + "; got: " + error;
  }
  return "";
}

}  // namespace

TEST_CASE("cut layers refuse values of other sizes", "[parallel][tensor][ranks][errors]") {
  const auto faults = run_ranks<std::string>(
      2, [](const Rank& self) { return fault_of(bad_values(Layers(self.group)), self); });
  for (const auto& fault : faults) CHECK(fault == "");
}

TEST_CASE("cut layers refuse inputs of other sizes", "[parallel][tensor][ranks][errors]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) {
    Layers on(self.group);
    return fault_of(bad_inputs(on), self);
  });
  for (const auto& fault : faults) CHECK(fault == "");
}

TEST_CASE("inputs of which ranks have different sizes end all", "[parallel][ranks][errors]") {
  const auto layer = GENERATE(0, 1, 2, 3);
  CAPTURE(layer);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    Layers on(self.group);
    const int64_t n = 2 + self.rank;
    if (layer == 0) on.column(torch::ones({n, 4}).requires_grad_()).sum().backward();
    if (layer == 1) on.row(torch::ones({n, 2}));
    if (layer == 2) on.table(torch::zeros({n}, torch::kLong));
    if (layer == 3) on.attention(torch::ones({n, 1, 4}));
  });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  CHECK_THAT(errors, Each(Contains("rank 0") && Contains("rank 1") && Contains("all_reduce")));
}
