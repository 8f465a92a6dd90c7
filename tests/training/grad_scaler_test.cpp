// The errors of a GradScaler, its archive and its agreement among ranks; mixed_precision.py
// compares its scales with Python's.
#include <limits>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/archives.h"
#include "support/catch.h"
#include "support/error_of.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using ddp::testing::error_of;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Training {
  explicit Training(float gradient) { parameter.mutable_grad() = torch::tensor({gradient, 1.0F}); }

  at::Tensor parameter = torch::zeros({2}, torch::requires_grad());
  torch::optim::SGD optimizer{{parameter}, 0.5};
};

}  // namespace

TEST_CASE("a GradScaler refuses options out of range", "[pure][errors]") {
  const auto refuses = [](const GradScalerOptions& options, const std::string& text) {
    CAPTURE(text);
    CHECK(error_of<c10::ValueError>([&] {
            const GradScaler scaler(options);
          }).find(text) != std::string::npos);
  };
  refuses(GradScalerOptions().init_scale(0), "expected init_scale above 0");
  refuses(GradScalerOptions().init_scale(1e39), "finite in float32, got 1e+39");
  refuses(GradScalerOptions().growth_factor(1), "expected growth_factor > 1, got 1");
  refuses(GradScalerOptions().backoff_factor(1), "backoff_factor < 1, got 1");
  refuses(GradScalerOptions().growth_interval(0), "growth_interval >= 1, got 0");
  const GradScaler disabled(GradScalerOptions().enabled(false).growth_factor(1));
  CHECK(disabled.get_scale() == 1);
}

TEST_CASE("a GradScaler refuses calls out of order", "[pure][errors]") {
  Training training(1);
  GradScaler scaler;
  const auto error = [](const auto& call) { return error_of(call); };
  CHECK(error([&] { scaler.update(); }).find("recorded prior to update") != std::string::npos);
  scaler.unscale_(training.optimizer);
  CHECK(error([&] {
          scaler.unscale_(training.optimizer);
        }).find("has already been called on this") != std::string::npos);
  CHECK(scaler.step(training.optimizer));
  CHECK(error([&] {
          scaler.unscale_(training.optimizer);
        }).find("called after step()") != std::string::npos);
  CHECK(error([&] {
          scaler.step(training.optimizer);
        }).find("step() has already been called") != std::string::npos);
  scaler.update();
  training.parameter.mutable_grad().reset();
  CHECK(error([&] {
          scaler.step(training.optimizer);
        }).find("expected gradients") != std::string::npos);
  CHECK(error([&] { scaler.update(-1.0); }).find("new_scale above 0") != std::string::npos);
  CHECK(error([&] { scaler.scale(at::Tensor()); }).find("undefined") != std::string::npos);
  CHECK(scaler.get_scale() == 65536);

  const auto half = torch::zeros({2}, torch::dtype(torch::kHalf));
  half.mutable_grad() = torch::ones_like(half);
  torch::optim::SGD of_half({half}, 0.1);
  CHECK(error([&] {
          scaler.step(of_half);
        }).find("attempting to unscale FP16 gradients") != std::string::npos);
  torch::optim::LBFGS lbfgs({training.parameter});
  CHECK(error([&] { scaler.step(lbfgs); }).find("got LBFGS") != std::string::npos);
}

TEST_CASE("a GradScaler that is not enabled changes nothing", "[pure]") {
  Training training(kInf);
  GradScaler scaler(GradScalerOptions().enabled(false));
  const auto loss = torch::ones({});
  CHECK(scaler.scale(loss).is_same(loss));
  scaler.unscale_(training.optimizer);
  CHECK(scaler.step(training.optimizer));
  scaler.update();
  CHECK(training.parameter[0].item<float>() == -kInf);

  auto in = testing::reread(scaler);
  scaler.load(in);
  GradScaler enabled;
  CHECK(error_of([&] {
          enabled.load(in);
        }).find("got that of one that was not") != std::string::npos);
}

TEST_CASE("a GradScaler unscales the values of sparse gradients", "[pure]") {
  const auto parameter = torch::zeros({4, 1});
  torch::optim::SGD optimizer({parameter}, 1.0);
  GradScaler scaler;
  const auto indices = torch::tensor({{0, 2}}, torch::kLong);
  parameter.mutable_grad() =
      torch::sparse_coo_tensor(indices, scaler.scale(torch::tensor({{3.0F}, {5.0F}})), {4, 1});
  scaler.unscale_(optimizer);
  CHECK(torch::equal(parameter.grad().to_dense(), torch::tensor({{3.0F}, {0.0F}, {5.0F}, {0.0F}})));
}

TEST_CASE("a GradScaler unscales values that sparse gradients share once", "[pure]") {
  const auto a = torch::ones({4, 1}, torch::requires_grad());
  const auto b = torch::ones({4, 1}, torch::requires_grad());
  torch::optim::SGD optimizer({a, b}, 1.0);
  GradScaler scaler;
  const auto indices = torch::tensor({0, 2}, torch::kLong);
  const auto rows_of = [&](const at::Tensor& table) {
    return torch::embedding(table, indices, -1, false, /*sparse=*/true);
  };
  scaler.scale(((rows_of(a) + rows_of(b)) * torch::ones({2, 1})).sum()).backward();
  REQUIRE(a.grad()._values().data_ptr() == b.grad()._values().data_ptr());
  scaler.unscale_(optimizer);
  const auto expected = torch::tensor({{1.0F}, {0.0F}, {1.0F}, {0.0F}});
  CHECK(torch::equal(a.grad().to_dense(), expected));
  CHECK(torch::equal(b.grad().to_dense(), expected));
}

TEST_CASE("ranks of found_inf_groups skip a step together", "[ranks]") {
  const auto results = ddp::testing::run_ranks<at::Tensor>(3, [](const auto& self) {
    GradScaler scaler(GradScalerOptions().init_scale(8).found_inf_groups({self.group}));
    // Rank 1 finds an infinity, and rank 2 has no gradients in the second round.
    Training training(self.rank == 1 ? kInf : 8.0F);
    const bool first = scaler.step(training.optimizer);
    scaler.update();
    training.parameter.mutable_grad() = torch::full({2}, 4.0F);
    if (self.rank == 2) training.parameter.mutable_grad().reset();
    const bool second = scaler.step(training.optimizer);
    scaler.update();
    return torch::tensor(
        {static_cast<float>(first), static_cast<float>(second),
         static_cast<float>(scaler.get_scale()), training.parameter[0].item<float>()});
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank, results[rank]);
    CHECK(torch::equal(results[rank], torch::tensor({0.0F, 1.0F, 4.0F, rank == 2 ? 0 : -0.5F})));
  }
}

TEST_CASE("a rank that cannot unscale fails the others", "[ranks][errors]") {
  const auto errors = ddp::testing::errors_of_ranks(2, [](const auto& self) {
    GradScaler scaler(GradScalerOptions().found_inf_groups({self.group}));
    const auto parameter = torch::zeros({2}, self.rank == 1 ? torch::kHalf : torch::kFloat);
    parameter.mutable_grad() = torch::ones_like(parameter);
    torch::optim::SGD optimizer({parameter}, 0.1);
    scaler.step(optimizer);
  });
  CHECK(errors[0].find("another rank of found_inf_groups") != std::string::npos);
  CHECK(errors[1].find("attempting to unscale FP16 gradients") != std::string::npos);
}
