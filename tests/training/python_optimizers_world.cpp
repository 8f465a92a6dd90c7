// Prints the parameters of the optimizers in python_optimizers.py after each step, in hexadecimal.
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include <ddp/optim.h>
#include <torch/torch.h>

#include "optimizer_runs.h"

namespace ddp_python_optimizers_world {

namespace {

using namespace ddp::testing;

constexpr int kSteps = 50;

std::map<std::string, MakeOptimizer> cases() {
  namespace optim = ddp::optim;
  const auto often = [](auto options) {
    return options.lr(0.02).betas({0.8, 0.97}).eps(1e-6).weight_decay(0.1);
  };
  const auto nadam = often(optim::NAdamOptions());
  const auto radam = often(optim::RAdamOptions());
  auto nadam_decoupled = nadam, nadam_decay = nadam;
  auto radam_decoupled = radam;
  nadam_decoupled.decoupled_weight_decay(true);
  nadam_decay.momentum_decay(0.01);
  radam_decoupled.decoupled_weight_decay(true);
  optim::MuonOptions muon_rms(0.02);
  muon_rms.weight_decay(0.01).momentum(0.9).nesterov(false).ns_coefficients({3.0, -3.2, 1.2});
  muon_rms.eps(1e-5).ns_steps(3).adjust_lr_fn("match_rms_adamw");
  return {
      {"nadam", make_in_groups<optim::NAdam>(optim::NAdamOptions())},
      {"nadam_decay", make_in_groups<optim::NAdam>(nadam_decay)},
      {"nadam_decoupled", make_in_groups<optim::NAdam>(nadam_decoupled)},
      {"radam", make_in_groups<optim::RAdam>(optim::RAdamOptions())},
      {"radam_decay", make_in_groups<optim::RAdam>(radam)},
      {"radam_decoupled", make_in_groups<optim::RAdam>(radam_decoupled)},
      {"adamax", make_in_groups<optim::Adamax>(optim::AdamaxOptions())},
      {"adamax_decay", make_in_groups<optim::Adamax>(often(optim::AdamaxOptions()))},
      {"adadelta", make_in_groups<optim::Adadelta>(optim::AdadeltaOptions())},
      {"adadelta_decay", make_in_groups<optim::Adadelta>(
                             optim::AdadeltaOptions(0.5).rho(0.8).eps(1e-5).weight_decay(0.1))},
      {"muon", make_in_groups<optim::Muon>(optim::MuonOptions())},
      {"muon_rms", make_in_groups<optim::Muon>(muon_rms)},
      {"lion", make_in_groups<optim::Lion>(optim::LionOptions())},
      {"lion_decay",
       make_in_groups<optim::Lion>(optim::LionOptions(0.02).betas({0.8, 0.97}).weight_decay(0.1))},
      {"lamb", make_in_groups<optim::LAMB>(optim::LAMBOptions())},
      {"lamb_decay", make_in_groups<optim::LAMB>(often(optim::LAMBOptions()))},
  };
}

void print_run(
    const std::string& name, const std::string& label, at::ScalarType dtype,
    const MakeOptimizer& make_optimizer) {
  Tensors parameters;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{6, 4}, {4, 9}, {1, 5}}) {
    parameters.push_back(whole_numbers(sizes[0] * sizes[1], 37, 5, 101).view(sizes).to(dtype));
  }
  parameters[2].zero_();
  const auto optimizer = make_optimizer(parameters);
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& p = parameters[i];
      const auto shift = 29 * step + static_cast<int64_t>(i);
      p.mutable_grad() = whole_numbers(p.numel(), 53, shift, 97).view(p.sizes()).to(dtype);
    }
    if (step == 1 || step == 2) parameters[1].mutable_grad().reset();
    optimizer->step();
    std::printf("%s %s %d", name.c_str(), label.c_str(), step);
    for (const auto& p : parameters) {
      const auto flat = p.flatten();
      for (int64_t i = 0; i < flat.numel(); ++i) std::printf(" %a", flat[i].item<double>());
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  at::set_num_threads(1);
  for (const auto& [name, make_optimizer] : cases()) {
    print_run(name, "double", at::kDouble, make_optimizer);
    print_run(name, "float", at::kFloat, make_optimizer);
  }
  return 0;
}

}  // namespace ddp_python_optimizers_world
