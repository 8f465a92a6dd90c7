#include <algorithm>
#include <functional>
#include <limits>
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

namespace {

Tensor own_part(const Tensor& t, int64_t dim, const Rank& self) {
  return t.chunk(self.size, dim)[static_cast<size_t>(self.rank)];
}

const int64_t kTime = 6, kBatch = 2, kWidth = 12, kHidden = 24;

}  // namespace

TEST_CASE("a column and a row layer are the whole ones", "[parallel][tensor][ranks]") {
  const int ranks = GENERATE(1, 2, 3);
  const bool sequence = GENERATE(false, true);
  const auto x = draw_values({kTime, kBatch, kWidth}, 1);
  const auto w1 = draw_values({kHidden, kWidth}, 2), b1 = draw_values({kHidden}, 3);
  const auto w2 = draw_values({kWidth, kHidden}, 4), b2 = draw_values({kWidth}, 5);
  const auto weights = draw_values({kTime, kBatch, kWidth}, 6);

  std::vector<Tensor> whole{x, w1, b1, w2, b2};
  for (auto& tensor : whole) tensor = tensor.clone().requires_grad_();
  const auto y =
      torch::linear(torch::gelu(torch::linear(whole[0], whole[1], whole[2])), whole[3], whole[4]);
  (y * weights).sum().backward();

  const auto errors = run_ranks<std::vector<double>>(ranks, [&](const Rank& self) {
    ddp::ColumnParallelLinear up(
        ddp::ColumnParallelLinearOptions(kWidth, kHidden)
            .sequence_parallel(sequence)
            .process_group(self.group),
        w1, b1);
    ddp::RowParallelLinear down(
        ddp::RowParallelLinearOptions(kHidden, kWidth)
            .sequence_parallel(sequence)
            .process_group(self.group),
        w2, b2);
    const auto cut = [&](const Tensor& t) { return sequence ? own_part(t, 0, self) : t; };
    const auto input = cut(x).clone().requires_grad_();
    const auto output = down->forward(torch::gelu(up->forward(input)));
    (output * cut(weights)).sum().backward();
    return std::vector<double>{
        difference(output, cut(y)),
        difference(input.grad(), cut(whole[0].grad())),
        difference(up->weight.grad(), own_part(whole[1].grad(), 0, self)),
        difference(up->bias.grad(), own_part(whole[2].grad(), 0, self)),
        difference(down->weight.grad(), own_part(whole[3].grad(), 1, self)),
        difference(down->bias.grad(), whole[4].grad())};
  });
  for (const auto& by_rank : errors) {
    for (const double error : by_rank) CHECK(error < 1e-11);
  }
}

TEST_CASE(
    "a gathered column layer has the whole's features in order", "[parallel][tensor][ranks]") {
  const int64_t partitions = GENERATE(1, 2, 3);
  const auto x = draw_values({4, kWidth}, 1), w = draw_values({kHidden, kWidth}, 2);
  const auto expected = torch::linear(x, w);
  const auto errors = run_ranks<double>(2, [&](const Rank& self) {
    ddp::ColumnParallelLinear layer(
        ddp::ColumnParallelLinearOptions(kWidth, kHidden)
            .bias(false)
            .gather_output(true)
            .partitions(partitions)
            .process_group(self.group),
        w, Tensor());
    return difference(layer->forward(x), expected);
  });
  for (const double error : errors) CHECK(error < 1e-12);
}

TEST_CASE("partitions are cut one by one", "[parallel][tensor][ranks]") {
  const auto w = torch::arange(12, torch::kDouble).view({12, 1});
  const auto rows = run_ranks<std::vector<double>>(2, [&](const Rank& self) {
    ddp::ColumnParallelLinear qkv(
        ddp::ColumnParallelLinearOptions(1, 12).bias(false).partitions(3).process_group(self.group),
        w, Tensor());
    const auto own = qkv->weight.detach().flatten();
    return std::vector<double>(own.data_ptr<double>(), own.data_ptr<double>() + own.numel());
  });
  CHECK(rows[0] == std::vector<double>{0, 1, 4, 5, 8, 9});
  CHECK(rows[1] == std::vector<double>{2, 3, 6, 7, 10, 11});
}

TEST_CASE("a row layer cuts a whole input", "[parallel][tensor][ranks]") {
  const auto x = draw_values({4, kHidden}, 1), w = draw_values({kWidth, kHidden}, 2);
  auto whole = x.clone().requires_grad_();
  const auto y = torch::linear(whole, w);
  y.pow(2).sum().backward();
  const auto errors = run_ranks<double>(3, [&](const Rank& self) {
    ddp::RowParallelLinear layer(
        ddp::RowParallelLinearOptions(kHidden, kWidth)
            .bias(false)
            .input_is_parallel(false)
            .process_group(self.group),
        w, Tensor());
    const auto input = x.clone().requires_grad_();
    const auto output = layer->forward(input);
    output.pow(2).sum().backward();
    return std::max(difference(output, y), difference(input.grad(), whole.grad()));
  });
  for (const double error : errors) CHECK(error < 1e-11);
}

TEST_CASE("attention over divided heads is the whole one", "[parallel][tensor][ranks]") {
  const int ranks = GENERATE(1, 2, 3);
  const bool causal = GENERATE(false, true), sequence = GENERATE(false, true);
  const int64_t heads = 6;
  torch::nn::MultiheadAttention whole(kWidth, heads);
  whole->to(torch::kDouble);
  const auto x = draw_values({kTime, kBatch, kWidth}, 1);
  const auto weights = draw_values({kTime, kBatch, kWidth}, 2);
  const auto input_of_whole = x.clone().requires_grad_();
  Tensor mask;
  if (causal) {
    mask = torch::full({kTime, kTime}, -std::numeric_limits<double>::infinity(), torch::kDouble);
    mask = mask.triu(1);
  }
  const auto y = std::get<0>(whole->forward(
      input_of_whole, input_of_whole, input_of_whole, {}, /*need_weights=*/false, mask));
  (y * weights).sum().backward();

  const auto errors = run_ranks<std::vector<double>>(ranks, [&](const Rank& self) {
    ddp::ParallelMultiheadAttention layer(
        ddp::ParallelMultiheadAttentionOptions(kWidth, heads)
            .is_causal(causal)
            .sequence_parallel(sequence)
            .process_group(self.group),
        whole);
    const auto cut = [&](const Tensor& t) { return sequence ? own_part(t, 0, self) : t; };
    const auto input = cut(x).clone().requires_grad_();
    const auto output = layer->forward(input);
    (output * cut(weights)).sum().backward();
    // Rows of this rank's heads, of queries, keys and values each.
    const auto rows = [&](const Tensor& t) {
      return t.unflatten(0, {3, self.size, -1}).select(1, self.rank).flatten(0, 1);
    };
    return std::vector<double>{
        difference(output, cut(y)),
        difference(input.grad(), cut(input_of_whole.grad())),
        difference(layer->in_proj->weight.grad(), rows(whole->in_proj_weight.grad())),
        difference(layer->in_proj->bias.grad(), rows(whole->in_proj_bias.grad())),
        difference(
            layer->out_proj->weight.grad(), own_part(whole->out_proj->weight.grad(), 1, self)),
        difference(layer->out_proj->bias.grad(), whole->out_proj->bias.grad())};
  });
  for (const auto& by_rank : errors) {
    for (const double error : by_rank) CHECK(error < 1e-11);
  }
}

TEST_CASE(
    "a vocabulary that is cut has the whole's embeddings and losses", "[parallel][tensor][ranks]") {
  const int ranks = GENERATE(1, 2, 3);
  const double smoothing = GENERATE(0.0, 0.2);
  const bool sequence = GENERATE(false, true);
  const int64_t classes = GENERATE(6, 7, 4);  // 4 on 3 ranks: the last one has padding alone
  const auto table = draw_values({classes, kWidth}, 1);
  const auto tokens = torch::arange(kTime * kBatch).remainder(classes).view({kTime, kBatch});
  auto target = (tokens * 5 + 1).remainder(classes);
  target[1][0] = -100;

  const auto weight = table.clone().requires_grad_();
  const auto x = torch::embedding(weight, tokens);
  const auto logits = torch::linear(torch::tanh(x), weight);
  const auto loss = torch::nn::functional::cross_entropy(
      logits.flatten(0, 1), target.flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(smoothing));
  loss.backward();

  const auto errors = run_ranks<std::vector<double>>(ranks, [&](const Rank& self) {
    ddp::VocabParallelEmbedding embedding(
        ddp::VocabParallelEmbeddingOptions(classes, kWidth)
            .sequence_parallel(sequence)
            .process_group(self.group),
        table);
    auto own = torch::tanh(embedding->forward(tokens));
    const auto of_part = own;
    // With sequence_parallel the head gathers what each rank has.
    own = sequence ? ddp::functional::all_gather(own, 0, self.group)
                   : ddp::functional::copy_to_region(own, self.group);
    const auto own_logits = torch::linear(own, embedding->weight);
    const auto own_loss = ddp::vocab_parallel_cross_entropy(
        own_logits, target, self.group,
        ddp::VocabParallelCrossEntropyOptions().num_classes(classes).label_smoothing(smoothing));
    own_loss.backward();
    const int64_t rows = embedding->weight.size(0);
    auto padded = torch::zeros({rows * self.size, kWidth}, torch::kDouble);
    padded.narrow(0, 0, classes).copy_(weight.grad());
    const auto cut = [&](const Tensor& t) { return sequence ? own_part(t, 0, self) : t; };
    return std::vector<double>{
        difference(own_loss, loss), difference(of_part, cut(torch::tanh(x))),
        difference(embedding->weight.grad(), own_part(padded, 0, self))};
  });
  for (const auto& by_rank : errors) {
    for (const double error : by_rank) CHECK(error < 1e-12);
  }
}

TEST_CASE(
    "a loss over a cut vocabulary has cross_entropy's reductions", "[parallel][tensor][ranks]") {
  namespace F = torch::nn::functional;
  const int64_t classes = 8, rows = 5;
  const auto logits =
      draw_values({rows, classes}, 1) * 50;  // exp of these overflows unless shifted
  const auto target = torch::tensor({0, 7, 3, 9, 4});
  const auto of_whole = [&](const F::CrossEntropyFuncOptions::reduction_t& reduction) {
    return F::cross_entropy(
        logits, target, F::CrossEntropyFuncOptions().ignore_index(9).reduction(reduction));
  };
  const auto of_none = torch::full_like(target, 9);
  const auto errors = run_ranks<std::vector<double>>(2, [&](const Rank& self) {
    const auto own = own_part(logits, 1, self);
    const auto loss = [&](auto reduction, const Tensor& targets) {
      return ddp::vocab_parallel_cross_entropy(
          own, targets, self.group,
          ddp::VocabParallelCrossEntropyOptions().ignore_index(9).reduction(reduction));
    };
    const auto half = ddp::vocab_parallel_cross_entropy(
        own.to(torch::kBFloat16), target, self.group,
        ddp::VocabParallelCrossEntropyOptions().ignore_index(9));
    return std::vector<double>{
        difference(loss(torch::kMean, target), of_whole(torch::kMean)),
        difference(loss(torch::kSum, target), of_whole(torch::kSum)),
        difference(loss(torch::kNone, target), of_whole(torch::kNone)),
        loss(torch::kMean, of_none).isnan().item<bool>() ? 0.0 : 1.0,
        half.scalar_type() == torch::kFloat ? 0.0 : 1.0};
  });
  for (const auto& by_rank : errors) {
    for (const double error : by_rank) CHECK(error < 1e-11);
  }
}

TEST_CASE("layers that are cut can be cloned, saved and loaded", "[parallel][tensor][ranks]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    ddp::RowParallelLinear layer(
        ddp::RowParallelLinearOptions(kHidden, kWidth)
            .sequence_parallel(true)
            .process_group(self.group),
        draw_values({kWidth, kHidden}, 1), draw_values({kWidth}, 2));
    const auto copy = std::dynamic_pointer_cast<ddp::RowParallelLinearImpl>(layer->clone());
    if (!copy->weight.equal(layer->weight) || copy->weight.is_same(layer->weight)) return "clone";
    const auto x = draw_values({4, kHidden / 2}, 3);
    copy->forward(x).sum().backward();
    if (copy->bias.grad()[0].item<double>() != 4) return "the clone's bias";  // 2 rows on each rank
    std::stringstream stream;
    torch::save(layer, stream);
    {
      const torch::NoGradGuard no_grad;
      layer->weight.zero_();
    }
    torch::load(layer, stream);
    return layer->weight.equal(copy->weight) ? "" : "load";
  });
  CHECK(faults == std::vector<std::string>(2));
}

TEST_CASE(
    "a norm between sequence parallel layers stays equal on all ranks",
    "[parallel][tensor][ranks]") {
  const bool marked = GENERATE(true, false);
  const auto x = draw_values({kTime, kBatch, kWidth}, 1);
  const auto w1 = draw_values({kHidden, kWidth}, 2) * 0.1,
             w2 = draw_values({kWidth, kHidden}, 3) * 0.1;
  const auto bias = draw_values({kWidth}, 4);
  const auto norms = run_ranks<std::vector<Tensor>>(2, [&](const Rank& self) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({kWidth}));
    norm->to(torch::kDouble);
    ddp::ColumnParallelLinear up(
        ddp::ColumnParallelLinearOptions(kWidth, kHidden)
            .bias(false)
            .sequence_parallel(true)
            .process_group(self.group),
        w1, Tensor());
    ddp::RowParallelLinear down(
        ddp::RowParallelLinearOptions(kHidden, kWidth)
            .sequence_parallel(true)
            .process_group(self.group),
        w2, bias);
    if (marked) {
      ddp::mark_replicated_partial(*norm, self.group);
      ddp::mark_replicated_partial(*norm, self.group);  // once is enough, twice is no more
    }
    torch::optim::SGD optimizer(
        {{norm->parameters()}, {up->parameters()}, {down->parameters()}},
        torch::optim::SGDOptions(1e-3).momentum(0.9));
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      const auto input = own_part(x, 0, self);
      (input + down->forward(torch::gelu(up->forward(norm->forward(input)))))
          .pow(2)
          .sum()
          .backward();
      optimizer.step();
    }
    return std::vector<Tensor>{norm->weight.detach(), norm->bias.detach(), down->bias.detach()};
  });
  CHECK(norms[0][0].isfinite().all().item<bool>());
  CHECK_FALSE(norms[0][0].equal(torch::ones_like(norms[0][0])));
  CHECK(norms[0][2].equal(norms[1][2]));
  CHECK(norms[0][0].equal(norms[1][0]) == marked);
  CHECK(norms[0][1].equal(norms[1][1]) == marked);
}

TEST_CASE("layers that are cut refuse what does not fit", "[parallel][tensor][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    const auto of = [&](const std::function<void()>& call) {
      return error_of<c10::ValueError>(call);
    };
    const auto& g = self.group;
    const auto w = torch::zeros({4, 4});
    ddp::ColumnParallelLinear column(
        ddp::ColumnParallelLinearOptions(4, 4).bias(false).process_group(g), w, Tensor());
    ddp::VocabParallelEmbedding embedding(
        ddp::VocabParallelEmbeddingOptions(4, 4).process_group(g), w);
    const auto logits = torch::zeros({3, 2});
    const auto loss = [&](const Tensor& target,
                          const ddp::VocabParallelCrossEntropyOptions& options) {
      return of([&] { ddp::vocab_parallel_cross_entropy(logits, target, g, options); });
    };
    const ddp::VocabParallelCrossEntropyOptions options;
    return std::vector<std::string>{
        of([&] {
          ddp::ColumnParallelLinear(
              ddp::ColumnParallelLinearOptions(4, 9).partitions(3).process_group(g));
        }),
        of([&] { ddp::RowParallelLinear(ddp::RowParallelLinearOptions(5, 4).process_group(g)); }),
        of([&] {
          ddp::ParallelMultiheadAttention(
              ddp::ParallelMultiheadAttentionOptions(9, 3).process_group(g));
        }),
        of([&] {
          column->forward(torch::zeros({2, 5}));
        }),
        of([&] {
          embedding->forward(torch::tensor({0, 4}));
        }),
        of([&] { embedding->forward(torch::tensor({-1})); }),
        loss(torch::tensor({0, 1}), options),
        loss(torch::tensor({0, 1, 4}), options),
        loss(
            torch::tensor({0, 1, 3}),
            ddp::VocabParallelCrossEntropyOptions(options).num_classes(3)),
        loss(
            torch::tensor({0, 1, 2}),
            ddp::VocabParallelCrossEntropyOptions(options).num_classes(5)),
        loss(
            torch::tensor({0, 1, 2}),
            ddp::VocabParallelCrossEntropyOptions(options).label_smoothing(1.5))};
  });
  const std::vector<std::string> texts{
      "ColumnParallelLinear: expected out_features to be a multiple of partitions * ranks = 6, got "
      "9",
      "RowParallelLinear: expected in_features to be a multiple of ranks = 2, got 5",
      "ParallelMultiheadAttention: expected num_heads to be a multiple of ranks = 2, got 3",
      "ColumnParallelLinear: expected an input [..., 4], got [2, 5]",
      "VocabParallelEmbedding: expected numbers from 0 to 3, got 4",
      "VocabParallelEmbedding: expected numbers from 0 to 3, got -1",
      "expected logits [..., classes] and a target [...], got [3, 2] and [2]",
      "expected targets from 0 to 3 or ignore_index, got 4",
      "expected targets from 0 to 2 or ignore_index, got 3",
      "expected num_classes of 1 to 4, the logits of all ranks, got 5",
      "expected label_smoothing of 0 to 1, got 1.5"};
  for (const auto& by_rank : errors) {
    for (size_t i = 0; i < texts.size(); ++i) CHECK_THAT(by_rank[i], Contains(texts[i]));
  }
}
