#include "schedules/momentum.h"

#include <string_view>
#include <tuple>

#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>

namespace ddp {
namespace {

/// Sets an optimizer's momentum or beta1.
struct MomentumSetter : NoFields {
  explicit MomentumSetter(double value) : momentum(value) {}

  void number(const char* name, double& value) {
    if (name == std::string_view("momentum")) set(value);
  }
  void pair(const char* name, std::tuple<double, double>& value) {
    if (name == std::string_view("betas")) set(std::get<0>(value));
  }

  double momentum;
  bool is_set = false;

 private:
  void set(double& value) {
    value = momentum;
    is_set = true;
  }
};

/// \return  whether the optimizer has a momentum.
bool set_momentum(torch::optim::OptimizerOptions& options, double value) {
  MomentumSetter setter(value);
  with_kind(options, [&](auto kind, auto& own) {
    if constexpr (decltype(kind)::kStepsEachParameter) visit_options(setter, own);
  });
  return setter.is_set;
}

}  // namespace

void cycle_momentum_to(
    double momentum, torch::optim::Optimizer& optimizer, size_t group, const char* schedule) {
  DDP_CHECK_VALUE(
      set_momentum(optimizer.param_groups()[group].options(), momentum), schedule,
      ": expected an optimizer with momentum or beta1 (such as SGD or Adam) for "
      "cycle_momentum, got another one. Set cycle_momentum(false).");
}

}  // namespace ddp
