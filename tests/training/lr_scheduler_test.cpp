// The errors of schedules; lr_schedules.py compares their rates with Python's.
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/archives.h"
#include "support/catch.h"
#include "support/error_of.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using ddp::testing::error_of;

torch::optim::SGD make_sgd(size_t groups = 1) {
  std::vector<torch::optim::OptimizerParamGroup> all;
  for (size_t i = 0; i < groups; ++i) all.emplace_back(std::vector<at::Tensor>{torch::zeros({1})});
  return torch::optim::SGD(all, torch::optim::SGDOptions(0.1));
}

}  // namespace

TEST_CASE("a schedule refuses options out of range", "[pure][errors]") {
  auto sgd = make_sgd(2);
  const auto refuses = [&](const std::string& text, const auto& make) {
    CAPTURE(text);
    const auto error = error_of([&] { make(); });
    CHECK(error.find(text) != std::string::npos);
    CHECK(sgd.param_groups()[0].options().get_lr() == 0.1);
  };
  using Lambda = LambdaLR::Lambda;
  refuses("one for each of the 2 parameter groups, got 3", [&] {
    LambdaLR(sgd, std::vector<Lambda>(3, [](int64_t) { return 1.0; }));
  });
  refuses("got an empty one", [&] { LambdaLR(sgd, Lambda()); });
  refuses("start_factor <= 1, got 0", [&] { LinearLR(sgd, LinearLROptions().start_factor(0)); });
  refuses("end_factor <= 1, got 1.5", [&] { LinearLR(sgd, LinearLROptions().end_factor(1.5)); });
  refuses("total_iters >= 1, got 0", [&] { LinearLR(sgd, LinearLROptions().total_iters(0)); });
  refuses("factor <= 1, got 0", [&] { ConstantLR(sgd, ConstantLROptions().factor(0)); });
  refuses("total_iters >= 1, got 0", [&] { ConstantLR(sgd, ConstantLROptions().total_iters(0)); });
  refuses(
      "total_iters >= 1, got 0", [&] { PolynomialLR(sgd, PolynomialLROptions().total_iters(0)); });
  refuses("MultiplicativeLR: expected a function for lr_lambda", [&] {
    MultiplicativeLR(sgd, MultiplicativeLR::Lambda());
  });
  refuses("T_max >= 1, got 0", [&] { CosineAnnealingLR(sgd, CosineAnnealingLROptions()); });
  refuses("expected one max_lr, or one for each of the 2 parameter groups, got 0", [&] {
    OneCycleLR(sgd, OneCycleLROptions().total_steps(5));
  });
  refuses("expected total_steps, or epochs and steps_per_epoch", [&] {
    OneCycleLR(sgd, OneCycleLROptions().max_lr(0.1).epochs(2));
  });
  refuses("total_steps >= 1, got -1", [&] { OneCycleLR(sgd, OneCycleLROptions(0.1, -1)); });
  refuses(
      "pct_start <= 1, got 2", [&] { OneCycleLR(sgd, OneCycleLROptions(0.1, 10).pct_start(2)); });
  refuses("pct_start is 0.1 of 10 steps", [&] {
    OneCycleLR(sgd, OneCycleLROptions(0.1, 10).pct_start(0.1));
  });
  refuses(
      "got \"sine\"", [&] { OneCycleLR(sgd, OneCycleLROptions(0.1, 10).anneal_strategy("sine")); });
}

TEST_CASE(
    "a schedule with cycles, or for averages, refuses options out of range", "[pure][errors]") {
  auto sgd = make_sgd(2);
  const auto refuses = [&](const std::string& text, const auto& make) {
    CAPTURE(text);
    const auto error = error_of([&] { make(); });
    CHECK(error.find(text) != std::string::npos);
    CHECK(sgd.param_groups()[0].options().get_lr() == 0.1);
  };
  using Restarts = CosineAnnealingWarmRestarts;
  using RestartsOptions = CosineAnnealingWarmRestartsOptions;
  refuses("T_0 >= 1, got 0", [&] { Restarts(sgd, RestartsOptions()); });
  refuses("T_mult >= 1, got 0", [&] { Restarts(sgd, RestartsOptions(2).T_mult(0)); });
  refuses("an epoch >= 0, got -1", [&] { Restarts(sgd, 2).step(-1); });
  refuses("expected one base_lr, or one for each of the 2 parameter groups, got 3", [&] {
    CyclicLR(sgd, CyclicLROptions({1, 2, 3}, 4));
  });
  refuses("step_size_up >= 1 and step_size_down >= 0, got 0 and 0", [&] {
    CyclicLR(sgd, CyclicLROptions(0.1, 0.2).step_size_up(0));
  });
  refuses("got \"square\"", [&] { CyclicLR(sgd, CyclicLROptions(0.1, 0.2).mode("square")); });
  refuses("for scale_mode, got \"epochs\"", [&] {
    CyclicLR(sgd, CyclicLROptions(0.1, 0.2).scale_mode("epochs"));
  });
  refuses("expected one swa_lr", [&] { SWALR(sgd, SWALROptions()); });
  refuses("anneal_epochs >= 0, got -1", [&] { SWALR(sgd, SWALROptions(0.1).anneal_epochs(-1)); });
  refuses("got \"sine\"", [&] { SWALR(sgd, SWALROptions(0.1).anneal_strategy("sine")); });
}

TEST_CASE("a chain refuses schedules that it cannot step", "[pure][errors]") {
  auto sgd = make_sgd();
  auto other = make_sgd();
  LinearLR linear(sgd);
  LinearLR of_other(other);
  const auto error = [&](std::vector<LRScheduler*> schedulers) {
    return error_of([&] { ChainedScheduler{std::move(schedulers)}; });
  };
  CHECK(error({}).find("at least one scheduler, got none") != std::string::npos);
  CHECK(error({&linear, &of_other}).find("one of another for number 1") != std::string::npos);
  CHECK(error({&linear, nullptr}).find("got nullptr for number 1") != std::string::npos);
  ChainedScheduler chain({&linear});
  CHECK(error({&chain}).find("List its schedulers here") != std::string::npos);
  CHECK(error_of([&] {
          SequentialLR(sgd, {&chain}, {});
        }).find("got a ChainedScheduler for number 0") != std::string::npos);
  chain.step();
  CHECK(error({&linear}).find("a LinearLR, at epoch 1") != std::string::npos);
}

TEST_CASE("a cycle of momentum needs an optimizer that has one", "[pure][errors]") {
  torch::optim::Adagrad adagrad({torch::zeros({1})});
  const auto error = error_of([&] { OneCycleLR(adagrad, OneCycleLROptions(0.1, 10)); });
  CHECK(error.find("Set cycle_momentum(false)") != std::string::npos);
  CHECK(error_of([&] {
          CyclicLR(adagrad, CyclicLROptions(0.1, 0.2));
        }).find("CyclicLR: expected an optimizer with momentum") != std::string::npos);
  OneCycleLR cycle(adagrad, OneCycleLROptions(0.1, 10).cycle_momentum(false));
  for (int i = 0; i < 10; ++i) cycle.step();
  CHECK(
      error_of([&] { cycle.step(); }).find("at most total_steps (10) calls") != std::string::npos);
}

namespace {

using MakeSchedule = std::function<std::unique_ptr<LRScheduler>(torch::optim::Optimizer&)>;

template <typename Schedule, typename... Options>
MakeSchedule makes(const Options&... options) {
  return [=](torch::optim::Optimizer& optimizer) {
    return std::make_unique<Schedule>(optimizer, options...);
  };
}

void add_group(torch::optim::Optimizer& optimizer, double lr) {
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(
      {torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(lr)));
}

/// The rates of a group that is added with 0.5 after the schedule was made, in four steps, and the
/// error that ends them.
struct Added {
  std::vector<double> rates;
  std::string error;
  bool has_changed_momentum = false;  // in the step of the error
};

Added added_to(const MakeSchedule& make) {
  auto sgd = make_sgd();
  const auto schedule = make(sgd);
  add_group(sgd, 0.5);
  Added added;
  const auto momentum_of = [&] {
    return static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).momentum();
  };
  for (int step = 0; step < 4 && added.error.empty(); ++step) {
    const double momentum = momentum_of();
    added.error = error_of([&] { schedule->step(); });
    if (added.error.empty())
      added.rates.push_back(sgd.param_groups()[1].options().get_lr());
    else
      added.has_changed_momentum = momentum_of() != momentum;
  }
  return added;
}

}  // namespace

// As torch 2.11.0 in Python, but for SWALR, which fails there.
TEST_CASE("a schedule of present rates steps a group that was added", "[pure]") {
  const auto check = [](const MakeSchedule& make, const std::vector<double>& rates) {
    const auto added = added_to(make);
    CAPTURE(added.error);
    REQUIRE(added.rates.size() == rates.size());
    for (size_t i = 0; i < rates.size(); ++i) CHECK(std::abs(added.rates[i] - rates[i]) < 1e-5);
  };
  check(makes<MultiStepLR>(MultiStepLROptions({2})), {0.5, 0.05, 0.05, 0.05});
  check(makes<ConstantLR>(ConstantLROptions().total_iters(2)), {0.5, 1.5, 1.5, 1.5});
  check(makes<LinearLR>(LinearLROptions().total_iters(3)), {0.83333, 1.16667, 1.5, 1.5});
  check(makes<ExponentialLR>(0.9), {0.45, 0.405, 0.3645, 0.32805});
  check(makes<PolynomialLR>(), {0.4, 0.3, 0.2, 0.1});
  check(makes<CosineAnnealingLR>(CosineAnnealingLROptions(2)), {0.25, 0});
  check(makes<SWALR>(SWALROptions(0.05).anneal_epochs(2)), {0.275, 0.05, 0.05, 0.05});
}

TEST_CASE("a schedule names itself where a group was added", "[pure][errors]") {
  const auto check = [](const std::string& name, const MakeSchedule& make, size_t steps = 0) {
    CAPTURE(name);
    const auto added = added_to(make);
    CHECK(added.rates.size() == steps);
    CHECK_FALSE(added.has_changed_momentum);
    CHECK_THAT(
        added.error, ContainsText(
                         name +
                         ": expected the parameter groups of its construction, 1, got 2. "
                         "Construct " +
                         name + " after the optimizer's last group."));
  };
  const auto one = [](int64_t) { return 1.0; };
  check("LambdaLR", makes<LambdaLR>(LambdaLR::Lambda(one)));
  check("MultiplicativeLR", makes<MultiplicativeLR>(MultiplicativeLR::Lambda(one)));
  check("CosineAnnealingLR", makes<CosineAnnealingLR>(CosineAnnealingLROptions(2)), 2);
  check("CosineAnnealingWarmRestarts", makes<CosineAnnealingWarmRestarts>(2));
  check("CyclicLR", makes<CyclicLR>(CyclicLROptions(0.1, 0.2)));
  check("OneCycleLR", makes<OneCycleLR>(OneCycleLROptions(0.1, 10)));
}

TEST_CASE("a schedule of rates by group takes no group more", "[pure][errors]") {
  auto sgd = make_sgd(2);
  SWALR schedule(sgd, SWALROptions(PerGroup{0.1, 0.2}));
  add_group(sgd, 0.5);
  CHECK_THAT(
      error_of([&] { schedule.step(); }),
      ContainsText("SWALR: expected the parameter groups of its construction, 2, got 3"));
}

TEST_CASE("schedules of one chain have the same groups", "[pure][errors]") {
  auto sgd = make_sgd();
  LinearLR before(sgd);
  add_group(sgd, 0.5);
  ExponentialLR after(sgd, 0.9);
  const std::string expected = "LinearLR: expected the parameter groups of its construction, 1";
  CHECK_THAT(error_of([&] { ChainedScheduler({&before, &after}); }), ContainsText(expected));
  CHECK_THAT(error_of([&] { SequentialLR(sgd, {&before, &after}, {2}); }), ContainsText(expected));
}

TEST_CASE("a sequence refuses schedules of another optimizer", "[pure][errors]") {
  auto sgd = make_sgd();
  auto other = make_sgd();
  LinearLR linear(sgd);
  LinearLR of_other(other);
  CosineAnnealingLR cosine(sgd, 10);
  const auto error = [&](std::vector<LRScheduler*> schedulers, std::vector<int64_t> milestones) {
    return error_of([&] { SequentialLR(sgd, std::move(schedulers), std::move(milestones)); });
  };
  CHECK(error({}, {}).find("at least one scheduler") != std::string::npos);
  CHECK(error({&linear, &cosine}, {}).find("1 milestones for 2 schedulers") != std::string::npos);
  CHECK(error({&linear, &cosine}, {0}).find("from 1 on, got [0]") != std::string::npos);
  CHECK(error({&linear, &of_other}, {5}).find("one of another for number 1") != std::string::npos);
  CHECK(error({&linear, nullptr}, {5}).find("got nullptr for number 1") != std::string::npos);
  SequentialLR sequence(sgd, {&linear, &cosine}, {5});
  CHECK(error({&sequence}, {}).find("List its schedulers here") != std::string::npos);
  sequence.step();
  CHECK(error({&linear}, {}).find("a LinearLR, at epoch 1") != std::string::npos);
}

TEST_CASE("a schedule's state loads only with as many parameter groups", "[pure][errors]") {
  auto one = make_sgd(1);
  auto two = make_sgd(2);
  LinearLR saved(one);
  LinearLR loaded(two);
  auto in = ddp::testing::reread(saved);
  CHECK(error_of([&] {
          loaded.load(in);
        }).find("of 2 parameter groups, got that of 1") != std::string::npos);
  CHECK(loaded.last_epoch() == 0);
}

TEST_CASE("scaled_lr multiplies a rate by the number of ranks", "[ranks]") {
  const auto rates = ddp::testing::run_ranks<double>(
      3, [](const ddp::testing::Rank& self) { return scaled_lr(0.1, self.group); });
  CHECK(rates == std::vector<double>(3, 0.1 * 3));
}

TEST_CASE("scaled_lr takes the default group where it is given none", "[pure]") {
  ddp::init_process_group();  // a world of one
  CHECK(scaled_lr(0.1) == 0.1);
  ddp::destroy_process_group();
}
