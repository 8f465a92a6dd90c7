// Prints the parameters of the fused optimizers in fused_optimizers.py after each step, and the
// scale of their GradScaler, in hexadecimal.
#include <cstdio>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <ddp/grad_scaler.h>
#include <ddp/optim.h>
#include <torch/torch.h>

#include "optimizer_runs.h"

namespace ddp_fused_optimizers_world {

namespace {

using namespace ddp::testing;

constexpr int kSteps = 7;

std::map<std::string, MakeOptimizer> cases() {
  namespace fused = ddp::optim;
  const auto often = [](auto options) {
    return options.betas({0.8, 0.97}).eps(1e-6).weight_decay(0.1).amsgrad(true);
  };
  return {
      {"adamw", make_in_groups<fused::AdamW>(fused::AdamWOptions(0.01))},
      {"adamw_amsgrad", make_in_groups<fused::AdamW>(often(fused::AdamWOptions(0.01)))},
      {"adam", make_in_groups<fused::Adam>(fused::AdamOptions(0.01))},
      {"adam_amsgrad", make_in_groups<fused::Adam>(often(fused::AdamOptions(0.01)))},
      {"sgd", make_in_groups<fused::SGD>(fused::SGDOptions(0.1).weight_decay(0.01))},
      {"sgd_momentum",
       make_in_groups<fused::SGD>(fused::SGDOptions(0.1).momentum(0.9).dampening(0.3))},
      {"sgd_nesterov", make_in_groups<fused::SGD>(
                           fused::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01))},
      {"adagrad", make_in_groups<fused::Adagrad>(fused::AdagradOptions(0.1))},
      {"adagrad_decay",
       make_in_groups<fused::Adagrad>(
           fused::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(
               0.5))},
  };
}

struct Run {
  std::string name, dtype_name;
  at::ScalarType dtype;
  bool scaled;
};

void print_run(const Run& run, const MakeOptimizer& make_optimizer) {
  Tensors parameters;
  for (const int64_t count : {5, 130, 1}) {
    parameters.push_back(whole_numbers(count, 37, 5, 101).to(run.dtype));
  }
  const auto optimizer = make_optimizer(parameters);
  ddp::GradScaler scaler(
      ddp::GradScalerOptions().init_scale(16).growth_interval(3).enabled(run.scaled));
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < 3; ++i) {
      const auto& p = parameters[static_cast<size_t>(i)];
      p.mutable_grad() =
          scaler.scale(whole_numbers(p.numel(), 53, 29 * step + i, 97).to(run.dtype));
      if (step == 4 && i == 1) p.mutable_grad()[7] = std::numeric_limits<double>::infinity();
    }
    if (step == 1 || step == 2) parameters[1].mutable_grad().reset();
    if (step == 3) scaler.unscale_(*optimizer);
    if (run.scaled || step != 4) scaler.step(*optimizer);
    scaler.update();
    std::printf(
        "%s %s %d %d %a", run.name.c_str(), run.dtype_name.c_str(), run.scaled, step,
        scaler.get_scale());
    for (const auto& p : parameters) {
      for (int64_t i = 0; i < p.numel(); ++i) std::printf(" %a", p[i].item<double>());
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  at::set_num_threads(1);
  const std::vector<std::pair<std::string, at::ScalarType>> dtypes{
      {"float", at::kFloat},
      {"double", at::kDouble},
      {"bfloat16", at::kBFloat16},
      {"half", at::kHalf}};
  for (const auto& [name, make_optimizer] : cases()) {
    for (const auto& [dtype_name, dtype] : dtypes) {
      print_run({name, dtype_name, dtype, false}, make_optimizer);
      if (dtype == at::kHalf || name == "sgd_momentum") continue;
      print_run({name, dtype_name, dtype, true}, make_optimizer);
    }
  }
  return 0;
}

}  // namespace ddp_fused_optimizers_world
