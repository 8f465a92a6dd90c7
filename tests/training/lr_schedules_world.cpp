// Prints rates and momentums of the schedules in lr_schedules.py, 17 digits each. In the middle
// each schedule is saved, and continues in new objects that load the file.
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/lr_scheduler.h>
#include <torch/torch.h>

#include "support/archives.h"

namespace ddp_lr_schedules_world {

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
/// A schedule and the schedules that it needs; only the last one is stepped, for "both" all are.
using Schedules = std::vector<std::shared_ptr<ddp::LRScheduler>>;

std::vector<torch::optim::OptimizerParamGroup> groups() {
  return {
      torch::optim::OptimizerParamGroup({torch::zeros({1})}),
      torch::optim::OptimizerParamGroup({torch::zeros({1})})};
}

Optimizer sgd() {
  auto optimizer =
      std::make_unique<torch::optim::SGD>(groups(), torch::optim::SGDOptions(0.1).momentum(0.9));
  optimizer->param_groups()[1].options().set_lr(0.037);
  return optimizer;
}

Optimizer adam() {
  auto optimizer = std::make_unique<torch::optim::Adam>(groups(), torch::optim::AdamOptions(0.003));
  optimizer->param_groups()[1].options().set_lr(0.0007);
  return optimizer;
}

double momentum_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* of_sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return of_sgd->momentum();
  }
  return std::get<0>(dynamic_cast<const torch::optim::AdamOptions&>(options).betas());
}

struct Case {
  std::string name;
  Optimizer (*make_optimizer)();
  std::function<Schedules(torch::optim::Optimizer&)> make;
  bool steps_all = false;
};

template <typename T, typename... Args>
std::function<Schedules(torch::optim::Optimizer&)> one(Args... args) {
  return [=](torch::optim::Optimizer& o) { return Schedules{std::make_shared<T>(o, args...)}; };
}

std::vector<Case> cases() {
  using namespace ddp;
  using Lambda = LambdaLR::Lambda;
  const auto power = [](double base) {
    return Lambda([=](int64_t epoch) { return std::pow(base, static_cast<double>(epoch)); });
  };
  const std::vector<Lambda> lambdas{
      [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); },
      [](int64_t epoch) { return std::pow(0.9, static_cast<double>(epoch / 10)); }};
  const auto many = OneCycleLROptions()
                        .max_lr({0.01, 0.02})
                        .epochs(10)
                        .steps_per_epoch(23)
                        .pct_start(0.25)
                        .anneal_strategy("linear")
                        .three_phase(true)
                        .base_momentum({0.8, 0.81})
                        .max_momentum(0.97)
                        .div_factor(10)
                        .final_div_factor(100);
  using Sequence = std::vector<LRScheduler*>;
  return {
      {"lambda", sgd, one<LambdaLR>(power(0.97))},
      {"lambdas", sgd, one<LambdaLR>(lambdas)},
      {"multi_step", sgd,
       one<MultiStepLR>(MultiStepLROptions().milestones({30, 80, 80, 120}).gamma(0.3))},
      {"multi_step_at_0", sgd, one<MultiStepLR>(std::vector<int64_t>{0, 5})},
      {"linear", sgd, one<LinearLR>()},
      {"linear_down", adam,
       one<LinearLR>(LinearLROptions().start_factor(0.9).end_factor(0.05).total_iters(150))},
      {"cosine", sgd, one<CosineAnnealingLR>(50)},
      {"cosine_eta", adam,
       one<CosineAnnealingLR>(CosineAnnealingLROptions().T_max(13).eta_min(1e-5))},
      {"cosine_1", sgd, one<CosineAnnealingLR>(CosineAnnealingLROptions(1).eta_min(0.01))},
      {"one_cycle", sgd, one<OneCycleLR>(OneCycleLROptions(0.4, 200))},
      {"one_cycle_adam", adam, one<OneCycleLR>(many)},
      {"one_cycle_lr_only", sgd,
       one<OneCycleLR>(OneCycleLROptions(0.4, 300).pct_start(0).cycle_momentum(false))},
      {"warm_up_and_cosine", sgd,
       [](auto& o) {
         const auto linear =
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.1).total_iters(7));
         const auto cosine =
             std::make_shared<CosineAnnealingLR>(o, CosineAnnealingLROptions(60).eta_min(1e-4));
         const auto both = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), cosine.get()}, std::vector<int64_t>{7});
         return Schedules{linear, cosine, both};
       }},
      {"three_in_another_order", adam,
       [=](auto& o) {
         const auto steps = std::make_shared<MultiStepLR>(
             o, MultiStepLROptions().milestones({0, 3, 8}).gamma(0.7));
         const auto lambda = std::make_shared<LambdaLR>(o, power(0.95));
         const auto linear =
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.3).total_iters(9));
         const auto all = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), lambda.get(), steps.get()}, std::vector<int64_t>{10, 90});
         return Schedules{steps, lambda, linear, all};
       }},
      {"one_cycle_behind", sgd,
       [](auto& o) {
         const auto linear = std::make_shared<LinearLR>(o, LinearLROptions().total_iters(4));
         const auto cycle = std::make_shared<OneCycleLR>(o, OneCycleLROptions(0.5, 250));
         const auto both = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), cycle.get()}, std::vector<int64_t>{20});
         return Schedules{linear, cycle, both};
       }},
      {"both", sgd,
       [](auto& o) {
         return Schedules{
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.2).total_iters(20)),
             std::make_shared<MultiStepLR>(
                 o, MultiStepLROptions().milestones({40, 100}).gamma(0.1))};
       },
       /*steps_all=*/true},
  };
}

void print(const std::string& name, int step, torch::optim::Optimizer& optimizer) {
  std::printf("%s %d", name.c_str(), step);
  for (const auto& group : optimizer.param_groups()) {
    std::printf(" %.17g", group.options().get_lr());
  }
  for (const auto& group : optimizer.param_groups()) {
    std::printf(" %.17g", momentum_of(group.options()));
  }
  std::printf("\n");
}

std::vector<std::string> saved(const Schedules& schedules) {
  std::vector<std::string> files;
  for (const auto& schedule : schedules) files.push_back(ddp::testing::bytes_of_archive(*schedule));
  return files;
}

void load(const Schedules& schedules, const std::vector<std::string>& files) {
  for (size_t i = 0; i < schedules.size(); ++i) {
    auto archive = ddp::testing::archive_of(files[i]);
    schedules[i]->load(archive);
  }
}

// Continues as a resumed run: constructs new objects, then loads the optimizer's options from its
// own file.
void resume(const Case& one, Optimizer& optimizer, Schedules& schedules) {
  const auto files = saved(schedules);
  auto fresh = one.make_optimizer();
  schedules = one.make(*fresh);
  load(schedules, files);
  for (size_t i = 0; i < fresh->param_groups().size(); ++i) {
    fresh->param_groups()[i].set_options(optimizer->param_groups()[i].options().clone());
  }
  optimizer = std::move(fresh);
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  constexpr int kSteps = 200;
  for (const auto& one : cases()) {
    auto optimizer = one.make_optimizer();
    auto schedules = one.make(*optimizer);
    for (int step = 0; step <= kSteps; ++step) {
      print(one.name, step, *optimizer);
      if (step == 33 || step == 90) resume(one, optimizer, schedules);
      if (step == kSteps) break;
      if (one.steps_all) {
        for (const auto& schedule : schedules) schedule->step();
      } else {
        schedules.back()->step();
      }
    }
  }
  return 0;
}

}  // namespace ddp_lr_schedules_world
