// Clipping of tensors that are cut over ranks, compared with the whole tensors in one process.
#include <ddp/gradients.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr double kInfiniteNorm = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

at::Tensor parameter_of(const at::Tensor& gradient) {
  auto parameter = torch::zeros_like(gradient).requires_grad_();
  parameter.mutable_grad() = gradient.clone();
  return parameter;
}

/// The whole gradients of a model: some cut over tp, some over dp, some over both, some not at all.
struct WholeGradients {
  at::Tensor rows, columns, both, replicated;

  explicit WholeGradients(at::ScalarType dtype = at::kDouble) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const auto draw = [&](at::IntArrayRef sizes) {
      return torch::empty(sizes, dtype).normal_(0, 1, generator);
    };
    rows = draw({6, 5});
    columns = draw({3, 4});
    both = draw({4, 4});
    replicated = draw({7});
  }

  std::vector<at::Tensor> parameters() const {
    return {
        parameter_of(rows), parameter_of(columns), parameter_of(both), parameter_of(replicated)};
  }
};

std::vector<at::Tensor> gradients_of_all(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

at::Tensor part_of(const at::Tensor& whole, int64_t dim, int rank) {
  return whole.tensor_split(2, dim)[static_cast<size_t>(rank)];
}

/// A rank's norm, and how far its clipped gradients are from its parts of the expected ones.
struct Clipped {
  double norm = 0;
  double distance = 0;
};

double largest_distance(
    const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& expected) {
  double distance = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (expected[i].numel() == 0) continue;
    distance = std::max(distance, (parameters[i].grad() - expected[i]).abs().max().item<double>());
  }
  return distance;
}

Clipped clip_on_crossed_groups(
    const Rank& self, const WholeGradients& whole, const std::vector<at::Tensor>& expected,
    double max_norm, double norm_type) {
  const int dp_rank = self.rank / 2, tp_rank = self.rank % 2;
  const auto tp = split_group(dp_rank, 0, self.group);
  const auto dp = split_group(tp_rank, 0, self.group);
  const auto parts = [&](const std::vector<at::Tensor>& of) {
    return std::vector<at::Tensor>{
        part_of(of[0], 0, tp_rank), part_of(of[1], 1, dp_rank),
        part_of(part_of(of[2], 0, dp_rank), 1, tp_rank), of[3]};
  };
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : parts(gradients_of_all(whole.parameters()))) {
    parameters.push_back(parameter_of(gradient));
  }
  Clipped result;
  result.norm = clip_grad_norm_(
      {{{parameters[0]}, {tp}},
       {{parameters[1]}, {dp}},
       {{parameters[2]}, {dp, tp}},
       {{parameters[3]}, {}}},
      max_norm, norm_type);
  result.distance = largest_distance(parameters, parts(expected));
  return result;
}

TEST_CASE("a norm over crossed groups equals that of one process", "[clip][ranks]") {
  const double norm_type = GENERATE(1.0, 2.0, 3.5, kInfiniteNorm);
  const double max_norm = GENERATE(0.5, 1e6);
  CAPTURE(norm_type, max_norm);
  const WholeGradients whole;
  const auto parameters = whole.parameters();
  const double norm = torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
  const auto expected = gradients_of_all(parameters);
  const auto results = run_ranks<Clipped>(4, [&](const Rank& self) {
    return clip_on_crossed_groups(self, whole, expected, max_norm, norm_type);
  });
  for (const auto& result : results) {
    CHECK(std::abs(result.norm - norm) < 1e-12 * norm);
    CHECK(result.norm == results.front().norm);
    CHECK(result.distance < 1e-12);
  }
}

TEST_CASE("parameters of one process are clipped as by LibTorch", "[clip][pure]") {
  const double norm_type = GENERATE(0.0, 1.0, 2.0, kInfiniteNorm);
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  const WholeGradients whole(dtype);
  const auto expected = whole.parameters();
  const auto parameters = whole.parameters();
  const double norm = torch::nn::utils::clip_grad_norm_(expected, 0.5, norm_type);
  CHECK(std::abs(clip_grad_norm_(parameters, 0.5, norm_type) - norm) < 1e-6 * norm);
  CHECK(largest_distance(parameters, gradients_of_all(expected)) < 1e-6);
}

TEST_CASE("tied parameters count once, and are scaled once", "[clip][pure]") {
  const auto tied = parameter_of(torch::full({1}, 10.0, torch::kDouble));
  CHECK(clip_grad_norm_({tied, tied}, 1.0) == 10);
  CHECK(tied.grad().item<double>() == Approx(1));
  tied.mutable_grad().fill_(10);
  CHECK(clip_grad_norm_({{{tied}, {}}, {{tied}, {}}}, 1.0) == 10);
  CHECK(tied.grad().item<double>() == Approx(1));
}

TEST_CASE("a module, and one set of parameters, are clipped by the same norm", "[clip][ranks]") {
  const auto norms = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    torch::nn::Linear net(3, 1);
    for (auto& p : net->parameters()) p.mutable_grad() = torch::full_like(p, self.rank + 1.0);
    const std::vector<ProcessGroup> groups{self.group};
    return std::vector<double>{
        clip_grad_norm_(*net, 1e9, 2, groups), clip_grad_norm_(net->parameters(), 1e9, 2, groups),
        clip_grad_norm_(*net, 1e9)};
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto sharded = Approx(std::sqrt(4.0 + 16.0));
    CHECK(norms[rank][0] == sharded);
    CHECK(norms[rank][1] == sharded);
    CHECK(norms[rank][2] == Approx(2.0 * (rank + 1)));
  }
}

TEST_CASE("a module without parameters takes part in clipping", "[clip][ranks]") {
  const auto norms = run_ranks<double>(2, [](const Rank& self) {
    torch::nn::Sequential net;
    if (self.rank == 0) net->push_back(torch::nn::Linear(3, 1));
    for (auto& p : net->parameters()) p.mutable_grad() = torch::ones_like(p);
    return clip_grad_norm_(*net, 1e9, 1, {self.group});
  });
  CHECK(norms == std::vector<double>(2, 4.0));
}

TEST_CASE("ranks without gradients or elements take part in clipping", "[clip][ranks]") {
  const double norm_type = GENERATE(2.0, kInfiniteNorm);
  const auto norms = run_ranks<double>(3, [&](const Rank& self) {
    std::vector<at::Tensor> parameters;
    if (self.rank == 0) parameters = {parameter_of(torch::full({4}, -3.0))};
    if (self.rank == 1) {
      parameters = {parameter_of(torch::empty({0})), torch::zeros({2}).requires_grad_()};
    }
    return clip_grad_norm_(parameters, 1.0, norm_type, {self.group});
  });
  CHECK(norms == std::vector<double>(3, norm_type == 2 ? 6.0 : 3.0));
}

TEST_CASE("gradients that are not finite reach every rank's norm", "[clip][ranks]") {
  const double norm_type = GENERATE(2.0, kInfiniteNorm);
  const double value = GENERATE(kNaN, kInfiniteNorm);
  const int bad_rank = GENERATE(0, 1, 2);
  CAPTURE(norm_type, value, bad_rank);
  const auto results = run_ranks<std::vector<double>>(3, [&](const Rank& self) {
    auto parameter = parameter_of(torch::full({2}, self.rank == bad_rank ? value : 1.0));
    const double norm = clip_grad_norm_({parameter}, 0.5, norm_type, {self.group});
    return std::vector<double>{norm, parameter.grad()[0].item<double>()};
  });
  for (int rank = 0; rank < 3; ++rank) {
    if (std::isnan(value)) {
      CHECK(std::isnan(results[rank][0]));
      CHECK(std::isnan(results[rank][1]));
    } else {
      CHECK(results[rank][0] == value);
      CHECK((rank == bad_rank ? std::isnan(results[rank][1]) : results[rank][1] == 0));
    }
  }
}

TEST_CASE("norms of low precision are added up in float", "[clip][pure]") {
  const auto dtype = GENERATE(at::kBFloat16, at::kHalf);
  const auto gradient = torch::full({310, 290}, 1.0, dtype);
  const auto parameters = std::vector<at::Tensor>{parameter_of(gradient), parameter_of(gradient)};
  // Rounded to 16 bits, the norm of each tensor would be off by 3e-4 of it.
  CHECK(clip_grad_norm_(parameters, 1e9) == Approx(std::sqrt(2 * 310 * 290)).epsilon(1e-6));
}

TEST_CASE("sparse gradients are clipped as the dense ones", "[clip][pure]") {
  const auto indices = torch::tensor({{0, 2, 0}});
  const auto sparse = torch::sparse_coo_tensor(indices, torch::tensor({1.0, 4.0, 2.0}), {3});
  auto parameter = torch::zeros({3}).requires_grad_();
  parameter.mutable_grad() = sparse;
  CHECK(clip_grad_norm_({parameter}, 2.5) == Approx(5));
  CHECK(torch::allclose(parameter.grad().to_dense(), torch::tensor({1.5, 0.0, 2.0})));
}

TEST_CASE("clipping refuses norms and groups that it cannot sum over", "[clip][errors][ranks]") {
  const auto parameters = WholeGradients().parameters();
  CHECK_THAT(
      error_of([&] { clip_grad_norm_(parameters, 1, -1); }),
      ContainsText("clip_grad_norm_: expected a norm_type above 0, got -1"));
  CHECK_THAT(
      error_of([&] { clip_grad_norm_(parameters, 1, kNaN); }),
      ContainsText("clip_grad_norm_: expected a norm_type above 0, got nan"));
  CHECK_THAT(
      error_of([&] { clip_grad_norm_(parameters, 1, 2, {ProcessGroup()}); }),
      ContainsText("clip_grad_norm_: expected groups of this rank in sharded_over"));
  for (const auto& error : errors_of_ranks(2, [&](const Rank& self) {
         clip_grad_norm_(WholeGradients().parameters(), 1, 0, {self.group});
       })) {
    CHECK_THAT(error, ContainsText("expected a norm_type above 0 for parts of tensors, got 0"));
  }
}

}  // namespace
}  // namespace ddp
