// Reduction::SampleWeighted where collectives mix the ranks' gradients within the backward pass:
// the gradient is that of one process over all rows.
#include <algorithm>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::sample_weights {
namespace {

using namespace testing;

constexpr int64_t kWidth = 4;
using Rows = std::vector<int64_t>;  // by rank

at::Tensor all_rows(const Rows& rows, int pass) {
  int64_t count = 0;
  for (const auto n : rows) count += n;
  return torch::sin(torch::arange(count * kWidth, at::kDouble).view({count, kWidth}) * 0.7 + pass);
}

int64_t begin_of(const Rows& rows, int rank) {
  int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += rows[static_cast<size_t>(r)];
  return begin;
}

at::Tensor own_rows(const Rows& rows, int pass, const Rank& self) {
  return all_rows(rows, pass)
      .narrow(0, begin_of(rows, self.rank), rows[static_cast<size_t>(self.rank)]);
}

/// The group is null in the one process.
class NormalizedImpl : public torch::nn::Module {
 public:
  explicit NormalizedImpl(const ProcessGroup& group, bool checkpoints = false)
      : checkpoints_(checkpoints) {
    blocks->push_back(torch::nn::Linear(kWidth, 6));
    if (group) {
      blocks->push_back(SyncBatchNorm1d(SyncBatchNormOptions(6).process_group(group)));
    } else {
      blocks->push_back(torch::nn::BatchNorm1d(6));
    }
    blocks->push_back(torch::nn::Tanh());
    register_module("blocks", blocks);
    last = register_module("last", torch::nn::Linear(6, 1));
    to(at::kDouble);
    set_waves(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(checkpoints_ ? checkpoint(blocks, x) : blocks->forward(x)).squeeze(1);
  }
  torch::nn::Sequential blocks;
  torch::nn::Linear last{nullptr};

 private:
  bool checkpoints_;
};
TORCH_MODULE(Normalized);

at::Tensor mean_loss(const at::Tensor& y) {
  return y.numel() == 0 ? y.sum() * 0 : (y - 0.3).square().mean();
}

std::vector<at::Tensor> normalized_in_one_process(const std::vector<Rows>& passes) {
  Normalized net{ProcessGroup()};
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    mean_loss(net(all_rows(passes[pass], static_cast<int>(pass)))).backward();
  }
  return gradients_of(*net);
}

DistributedDataParallelOptions weighted(const Rank& self) {
  return in(self).reduction(Reduction::SampleWeighted);
}

const std::string kDifferentParts =
    "expected each rank to have the same part of the samples in every backward pass that is "
    "averaged together, where passes go through collectives (SyncBatchNorm, ddp::functional) with "
    "Reduction::SampleWeighted, got samples by rank [4, 2, 1] in one pass and [";

/// A loss of each row against the rows of all ranks: a contrastive one, over embeddings that are
/// gathered, padded to one length.
at::Tensor contrastive(const at::Tensor& z, const Rows& rows, const Rank& self) {
  const auto longest = *std::max_element(rows.begin(), rows.end());
  const auto padded = torch::constant_pad_nd(z, {0, 0, 0, longest - z.size(0)});
  const auto gathered = functional::all_gather(padded, 0, self.group);
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    parts.push_back(gathered.narrow(0, static_cast<int64_t>(rank) * longest, rows[rank]));
  }
  const auto all = torch::cat(parts);
  if (z.size(0) == 0) return all.sum() * 0 + z.sum() * 0;
  const auto own = begin_of(rows, self.rank) + torch::arange(z.size(0));
  return torch::nn::functional::cross_entropy(z.matmul(all.t()) * 3, own);
}

torch::nn::Linear embedding() {
  torch::nn::Linear net(kWidth, 3);
  net->to(at::kDouble);
  set_waves(*net);
  return net;
}

std::vector<at::Tensor> contrastive_in_one_process(const std::vector<Rows>& passes) {
  auto net = embedding();
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    const auto z = torch::tanh(net(all_rows(passes[pass], static_cast<int>(pass))));
    torch::nn::functional::cross_entropy(z.matmul(z.t()) * 3, torch::arange(z.size(0))).backward();
  }
  return gradients_of(*net);
}

}  // namespace

TEST_CASE("SyncBatchNorm with uneven batches that are weighted", "[ranks][weights][many]") {
  const Rows rows = GENERATE(Rows{5, 2, 1}, Rows{4, 0, 3}, Rows{3, 3, 3});
  const std::string mode =
      GENERATE("plain", "views", "find_unused", "static_graph", "checkpoint", "early_end");
  CAPTURE(rows, mode);
  const auto expected = normalized_in_one_process({rows, rows});
  const auto seen = run_ranks<double>(3, [&](const Rank& self) {
    Normalized net(self.group, mode == "checkpoint");
    DistributedDataParallel model(
        net, weighted(self)
                 .gradient_as_bucket_view(mode == "views")
                 .find_unused_parameters(mode == "find_unused")
                 .static_graph(mode == "static_graph"));
    double difference = 0;
    const auto train = [&] {
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        for (int pass = 0; pass < 2; ++pass) {
          mean_loss(model->forward(own_rows(rows, pass, self))).backward();
        }
        difference = std::max(difference, largest_difference(gradients_of(*net), expected));
      }
    };
    if (mode == "early_end") {
      model->join(train, JoinOptions().throw_on_early_termination(true));
    } else {
      train();
    }
    return difference;
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("SyncBatchNorm in a model that returns its loss", "[ranks][weights][many]") {
  struct WithLossImpl : NormalizedImpl {
    using NormalizedImpl::NormalizedImpl;
    at::Tensor forward(const at::Tensor& x) { return mean_loss(NormalizedImpl::forward(x)); }
  };
  const bool accumulates = GENERATE(false, true);
  const Rows rows{5, 2, 1};
  const auto expected = normalized_in_one_process({rows, rows});
  const auto seen = run_ranks<double>(3, [&](const Rank& self) {
    const auto net = std::make_shared<WithLossImpl>(self.group);
    DistributedDataParallel model(torch::nn::ModuleHolder<WithLossImpl>(net), weighted(self));
    const auto backward = [&](int pass) { model->forward(own_rows(rows, pass, self)).backward(); };
    if (accumulates) {
      const auto guard = model->no_sync();
      backward(0);
    } else {
      backward(0);
    }
    backward(1);
    return largest_difference(gradients_of(*net), expected);
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("SyncBatchNorm of a part of the ranks with weighted batches", "[ranks][weights][many]") {
  const Rows rows{5, 2, 3, 1};
  // Two batches that are normalized apart, in one loss.
  Normalized net{ProcessGroup()};
  const auto x = all_rows(rows, 0).split_with_sizes({7, 4});
  mean_loss(torch::cat({net(x[0]), net(x[1])})).backward();
  const auto expected = gradients_of(*net);
  const auto seen = run_ranks<double>(4, [&](const Rank& self) {
    Normalized normalized(split_group(self.rank / 2, self.rank, self.group));
    DistributedDataParallel model(normalized, weighted(self).broadcast_buffers(false));
    mean_loss(model->forward(own_rows(rows, 0, self))).backward();
    return largest_difference(gradients_of(*normalized), expected);
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("accumulation through SyncBatchNorm keeps each rank's part", "[ranks][weights][many]") {
  const Rows rows{4, 2, 1};
  const Rows last = GENERATE(Rows{4, 2, 1}, Rows{8, 4, 2}, Rows{4, 1, 2});
  const bool is_same_part = last != Rows{4, 1, 2};
  const auto seen = run_ranks<std::string>(3, [&](const Rank& self) {
    Normalized net(self.group);
    DistributedDataParallel model(net, weighted(self));
    {
      const auto guard = model->no_sync();
      mean_loss(model->forward(own_rows(rows, 0, self))).backward();
    }
    const auto error =
        error_of([&] { mean_loss(model->forward(own_rows(last, 1, self))).backward(); });
    if (!error.empty()) return error;
    const auto difference =
        largest_difference(gradients_of(*net), normalized_in_one_process({rows, last}));
    return std::string(difference < 1e-12 ? "right" : "wrong");
  });
  for (const auto& text : seen) {
    if (is_same_part) {
      CHECK(text == "right");
    } else {
      CHECK_THAT(text, Catch::Contains(kDifferentParts + "8, 3, 3] in all. Leave no_sync() out"));
    }
  }
}

TEST_CASE("a loss over gathered embeddings of uneven batches", "[ranks][weights][many]") {
  const Rows rows = GENERATE(Rows{5, 2, 1}, Rows{4, 0, 3}, Rows{3, 3, 3});
  const bool skips = GENERATE(false, true);
  const bool keeps_graph = GENERATE(false, true);
  CAPTURE(rows, skips, keeps_graph);
  auto expected = contrastive_in_one_process({rows, rows});
  if (keeps_graph) {
    expected = contrastive_in_one_process({rows});
    for (auto& gradient : expected) gradient.mul_(2);
  }
  const auto seen = run_ranks<double>(3, [&](const Rank& self) {
    const auto net = embedding();
    DistributedDataParallel model(net, weighted(self).find_unused_parameters(skips));
    double difference = 0;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      for (int pass = 0; pass < (keeps_graph ? 1 : 2); ++pass) {
        const auto z = torch::tanh(model->forward(own_rows(rows, pass, self)));
        const auto loss = contrastive(z, rows, self);
        if (keeps_graph) loss.backward({}, /*retain_graph=*/true);
        loss.backward();
      }
      difference = std::max(difference, largest_difference(gradients_of(*net), expected));
    }
    return difference;
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("accumulation of a loss over gathered embeddings", "[ranks][weights][errors][many]") {
  const Rows rows{4, 2, 1};
  const Rows last = GENERATE(Rows{4, 2, 1}, Rows{4, 1, 2});
  const auto seen = run_ranks<std::string>(3, [&](const Rank& self) {
    const auto net = embedding();
    DistributedDataParallel model(net, weighted(self));
    const auto backward = [&](const Rows& of_pass, int pass) {
      const auto z = torch::tanh(model->forward(own_rows(of_pass, pass, self)));
      contrastive(z, of_pass, self).backward();
    };
    {
      const auto guard = model->no_sync();
      backward(rows, 0);
    }
    const auto error = error_of([&] { backward(last, 1); });
    if (!error.empty()) return error;
    const auto difference =
        largest_difference(gradients_of(*net), contrastive_in_one_process({rows, last}));
    return std::string(difference < 1e-12 ? "right" : "wrong");
  });
  for (const auto& text : seen) {
    if (last == rows) {
      CHECK(text == "right");
    } else {
      CHECK_THAT(text, Catch::Contains(kDifferentParts + "8, 3, 3] in all."));
    }
  }
}

TEST_CASE("a gradient penalty through a gathered embedding", "[ranks][weights][many]") {
  const Rows rows{5, 2, 1};
  const auto penalty = [](const at::Tensor& z, const at::Tensor& score) {
    const auto slope = torch::autograd::grad({score.sum()}, {z}, {}, true, true)[0];
    return slope.square().mean();
  };
  auto alone = embedding();
  const auto z = torch::tanh(alone(all_rows(rows, 0)));
  penalty(z, z.matmul(z.t()).square().sum(1)).backward();
  const auto expected = gradients_of(*alone);
  const auto seen = run_ranks<double>(3, [&](const Rank& self) {
    const auto net = embedding();
    DistributedDataParallel model(net, weighted(self));
    const auto own = torch::tanh(model->forward(own_rows(rows, 0, self)));
    const auto padded = torch::constant_pad_nd(own, {0, 0, 0, 5 - own.size(0)});
    const auto all = functional::all_gather(padded, 0, self.group);
    penalty(own, own.matmul(all.t()).square().sum(1)).backward();
    return largest_difference(gradients_of(*net), expected);
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("gradients of models whose parts of the samples differ", "[ranks][weights][errors]") {
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    DistributedDataParallel first(embedding(), weighted(self)), second(embedding(), weighted(self));
    const auto rows = self.rank == 0 ? 3 : 1;
    const auto a = first->forward(torch::ones({rows, kWidth}, at::kDouble));
    const auto b = second->forward(torch::ones({2, kWidth}, at::kDouble));
    const auto sum = functional::reduce_scatter(torch::cat({a.sum(0), b.sum(0)}), 0, self.group);
    sum.sum().backward();
  });
  CHECK_THAT(
      errors, Each(Catch::Contains(
                  "expected the models of one backward pass through collectives to have the "
                  "same parts of their samples on each rank with Reduction::SampleWeighted, "
                  "got weights of ")));
}

}  // namespace ddp::sample_weights
