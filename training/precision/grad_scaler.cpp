#include <ddp/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/fused_optimizer.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/zero.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

namespace ddp {
namespace {

constexpr const char* kHalfGradients =
    "GradScaler: attempting to unscale FP16 gradients: expected float32 ones, got Half, of ";
constexpr const char* kHalfRemedy =
    ". Leave the model in float32, and compute in half under an AutocastGuard.";

constexpr const char* kNoGradients =
    "GradScaler: no inf checks were recorded for this optimizer: expected gradients in its "
    "parameters, got none. Call backward() on the scaled loss first.";

bool is_scale(double value) { return value > 0 && std::isfinite(static_cast<float>(value)); }

void check_scale(const char* name, double value) {
  DDP_CHECK_VALUE(
      is_scale(value), "GradScaler: expected ", name, " above 0 and finite in float32, got ", value,
      ". 65536 is a good one to begin with.");
}

void check_options(const GradScalerOptions& options) {
  if (!options.enabled()) return;
  check_scale("init_scale", options.init_scale());
  DDP_CHECK_VALUE(
      options.growth_factor() > 1 && std::isfinite(options.growth_factor()),
      "GradScaler: expected growth_factor > 1, got ", options.growth_factor(), ". 2 is usual.");
  DDP_CHECK_VALUE(
      options.backoff_factor() > 0 && options.backoff_factor() < 1,
      "GradScaler: expected 0 < backoff_factor < 1, got ", options.backoff_factor(),
      ". 0.5 is usual.");
  DDP_CHECK_VALUE(
      options.growth_interval() > 0, "GradScaler: expected growth_interval >= 1, got ",
      options.growth_interval(), ". 2000 is usual.");
}

bool less_device(const c10::Device& a, const c10::Device& b) {
  return std::make_pair(a.type(), a.index()) < std::make_pair(b.type(), b.index());
}

/// The gradients that one kernel can unscale together.
using GradientKind = std::pair<c10::Device, at::ScalarType>;
struct LessKind {
  bool operator()(const GradientKind& a, const GradientKind& b) const {
    if (a.first != b.first) return less_device(a.first, b.first);
    return a.second < b.second;
  }
};
using GradientsByKind = std::map<GradientKind, std::vector<at::Tensor>, LessKind>;

/// Returns the optimizer as one whose gradients differ on each rank; null for other optimizers.
ZeroRedundancyOptimizerBase* as_gradient_sharded(torch::optim::Optimizer& optimizer) {
  auto* sharded = dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
  return sharded && sharded->options().stage() == 2 ? sharded : nullptr;
}

void check_supports_scaler(torch::optim::Optimizer& optimizer) {
  const auto* sharded = dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
  DDP_CHECK_VALUE(
      !sharded || !sharded->options().overlap(),
      "GradScaler: expected an optimizer that steps when it is told to, got a "
      "ZeroRedundancyOptimizer with overlap, which steps in the backward pass. Set "
      "overlap(false).");
  DDP_CHECK_VALUE(
      !sharded || !sharded->is_in_join(),
      "GradScaler: expected every rank to unscale, got a ZeroRedundancyOptimizer in a join(), "
      "where ranks without input step their parts as they are. Scale outside of join(), or give "
      "every rank as much input.");
}

GradientsByKind gradients_by_kind(torch::optim::Optimizer& optimizer, bool allow_half) {
  GradientsByKind gradients;
  if (const auto* sharded = as_gradient_sharded(optimizer)) {
    for (auto& gradient : sharded->gradients()) {
      DDP_CHECK_VALUE(
          gradient.scalar_type() != at::kHalf, kHalfGradients,
          "the ZeroRedundancyOptimizer's share", kHalfRemedy);
      gradients[{gradient.device(), gradient.scalar_type()}].push_back(std::move(gradient));
    }
    return gradients;
  }
  std::set<const void*> values_seen;
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    const auto& parameters = groups[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      DDP_CHECK_VALUE(
          allow_half || gradient.scalar_type() != at::kHalf, kHalfGradients, "parameter ", i,
          " in group ", group, kHalfRemedy);
      if (gradient.is_sparse()) {
        gradient = gradient._values();
        // Tables whose rows are added get one gradient, and autograd lets them share its values.
        if (!values_seen.insert(gradient.const_data_ptr()).second && gradient.numel() > 0) continue;
      }
      gradients[{gradient.device(), gradient.scalar_type()}].push_back(std::move(gradient));
    }
  }
  return gradients;
}

/// Multiplies gradients by `inverse`, shape [], float32, and looks for infinities and NaN.
///
/// \return 1 where there are some, else 0, on the device of the first; undefined for no gradients.
at::Tensor multiply_and_check(GradientsByKind gradients_of, const at::Tensor& inverse) {
  std::map<c10::Device, at::Tensor, decltype(&less_device)> infs(&less_device);
  for (auto& [kind, gradients] : gradients_of) {
    auto [inf, is_new] = infs.try_emplace(kind.first);
    if (is_new) inf->second = at::zeros({}, inverse.options().device(kind.first));
    at::_amp_foreach_non_finite_check_and_unscale_(
        gradients, inf->second, inverse.to(kind.first, /*non_blocking=*/true));
  }
  at::Tensor found;
  for (const auto& [device, inf] : infs) {
    found = found.defined() ? at::maximum(found, inf.to(found.device(), true)) : inf;
  }
  return found;
}

// In double, as in Python: this gives the float32 nearest to the reciprocal.
at::Tensor inverse_of(const at::Tensor& scale) {
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

at::Tensor unscale_and_check(
    torch::optim::Optimizer& optimizer, const at::Tensor& scale, bool allow_no_gradients) {
  auto found =
      multiply_and_check(gradients_by_kind(optimizer, /*allow_half=*/false), inverse_of(scale));
  DDP_CHECK(found.defined() || allow_no_gradients, kNoGradients);
  return found;
}

/// The result of a rank's check, the worst last.
enum class CheckResult : int64_t { Nothing, Inf, Error };

/// The options of a tensor for a collective of the optimizer's ranks. A group may have no backend
/// for the host, where a sharded model keeps parameters with cpu_offload.
at::TensorOptions carrier_of(torch::optim::Optimizer& optimizer, const ProcessGroup& group) {
  auto device = c10::Device(at::kCPU);
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) device = group.params().front().device();
  }
  return at::dtype(at::kLong).device(device.is_cpu() ? carrier_device(*group) : device);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options),
      scale_(at::full({}, static_cast<float>(options.init_scale()), at::kFloat)),
      growth_tracker_(at::zeros({}, at::kInt)) {
  check_options(options);
  for (const auto& group : options.found_inf_groups()) (void)GroupArg(group).get();
}

GradScaler::GradScaler(const GradScaler& other)
    : options_(other.options_),
      scale_(other.scale_.clone()),
      growth_tracker_(other.growth_tracker_.clone()),
      progress_(other.progress_) {}

GradScaler& GradScaler::operator=(const GradScaler& other) {
  options_ = other.options_;
  scale_ = other.scale_.clone();
  growth_tracker_ = other.growth_tracker_.clone();
  progress_ = other.progress_;
  return *this;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  DDP_CHECK_VALUE(
      loss.defined(),
      "GradScaler::scale: expected a loss, got an undefined tensor. Compute the loss first.");
  if (!enabled()) return loss;
  if (scale_.is_cpu()) return loss * scale_.item<float>();
  return loss * scale_.to(loss.device(), /*non_blocking=*/true);
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) const {
  return c10::fmap(losses, [this](const auto& loss) { return scale(loss); });
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled()) return;
  const auto progress = progress_.find(&optimizer);
  if (progress != progress_.end()) {
    DDP_CHECK(
        progress->second.stage != Stage::Unscaled,
        "unscale_() has already been called on this optimizer since the last update(). Call it at "
        "most once a step.");
    DDP_CHECK(false, "unscale_() is being called after step(). Call it before, or not at all.");
  }
  check_supports_scaler(optimizer);
  const c10::NoGradGuard no_grad;
  auto found = host_decides(optimizer)
                   ? agreed(optimizer)
                   : unscale_and_check(optimizer, scale_, /*allow_no_gradients=*/false);
  progress_[&optimizer] = {Stage::Unscaled, std::move(found)};
}

bool GradScaler::host_decides(const torch::optim::Optimizer& optimizer) const {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  return !fused || !fused->takes_found_inf() || !options_.found_inf_groups().empty();
}

// Unscales, and returns on the CPU what the ranks have found.
at::Tensor GradScaler::agreed(torch::optim::Optimizer& optimizer) const {
  auto groups = options_.found_inf_groups();
  if (const auto* sharded = as_gradient_sharded(optimizer)) {
    groups.push_back(sharded->process_group());
  }
  // The ranks of the groups wait for this rank, so it takes part after an error, too.
  auto found = CheckResult::Nothing;
  const auto error = exception_of([&] {
    const auto inf = unscale_and_check(optimizer, scale_, /*allow_no_gradients=*/!groups.empty());
    if (inf.defined() && inf.item<float>() != 0) found = CheckResult::Inf;
  });
  if (error) found = CheckResult::Error;
  for (const auto& group : groups) {
    auto worst = at::full({1}, static_cast<int64_t>(found), carrier_of(optimizer, group));
    all_reduce(worst, c10d::ReduceOp::MAX, group);
    found = static_cast<CheckResult>(worst.item<int64_t>());
  }
  if (error) std::rethrow_exception(error);
  DDP_CHECK(
      found != CheckResult::Error,
      "GradScaler: another rank of found_inf_groups could not unscale its gradients. See its "
      "error.");
  return at::full({}, found == CheckResult::Inf ? 1.0 : 0.0, at::kFloat);
}

StepOutcome GradScaler::step(torch::optim::Optimizer& optimizer) {
  const OptimizerTime::Scope time;
  DDP_CHECK_VALUE(
      !enabled() || !dynamic_cast<torch::optim::LBFGS*>(&optimizer),
      "GradScaler::step: expected an optimizer that steps on the gradients that are there, got "
      "LBFGS, which computes more within its step. Train it without a scaler, in float32 or "
      "bfloat16.");
  if (!enabled()) {
    optimizer.step();
    return StepOutcome({});
  }
  auto progress = progress_.find(&optimizer);
  DDP_CHECK(
      progress == progress_.end() || progress->second.stage != Stage::Stepped,
      "step() has already been called since the last update(). Call update() once a step, after "
      "the step of every optimizer.");
  if (!host_decides(optimizer)) return step_on_device(optimizer);
  if (progress == progress_.end()) {
    unscale_(optimizer);
    progress = progress_.find(&optimizer);
  }
  const StepOutcome outcome(progress->second.found_inf);
  if (outcome) {
    optimizer.step();
  } else if (auto* sharded = as_gradient_sharded(optimizer)) {
    sharded->zero_grad();  // as a step would, so that the next pass begins without gradients
  }
  progress->second.stage = Stage::Stepped;
  return outcome;
}

// The kernel divides gradients that unscale_() has not divided.
StepOutcome GradScaler::step_on_device(torch::optim::Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  at::Tensor grad_scale, found_inf;
  if (const auto progress = progress_.find(&optimizer); progress != progress_.end()) {
    found_inf = progress->second.found_inf;
  } else {
    found_inf = multiply_and_check(
        gradients_by_kind(optimizer, /*allow_half=*/true), at::ones({}, scale_.options()));
    DDP_CHECK(found_inf.defined(), kNoGradients);
    grad_scale = scale_;
  }
  dynamic_cast<FusedOptimizer&>(optimizer).step_scaled(grad_scale, found_inf);
  progress_[&optimizer] = {Stage::Stepped, found_inf};
  return StepOutcome(found_inf);
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled()) return;
  if (new_scale) {
    check_scale("new_scale", *new_scale);
    scale_.fill_(*new_scale);
    progress_.clear();
    return;
  }
  DDP_CHECK(
      !progress_.empty(),
      "GradScaler: no inf checks were recorded prior to update. Call step() for each optimizer "
      "first.");
  for (const auto& [optimizer, progress] : progress_) {
    const auto device = progress.found_inf.device();
    if (!scale_.is_cpu() || device.is_cpu()) continue;
    scale_ = scale_.to(device);
    growth_tracker_ = growth_tracker_.to(device);
  }
  auto found = at::zeros({}, scale_.options());
  for (const auto& [optimizer, progress] : progress_) {
    found += progress.found_inf.to(scale_.device(), /*non_blocking=*/true);
  }
  at::_amp_update_scale_(
      scale_, growth_tracker_, found, options_.growth_factor(), options_.backoff_factor(),
      options_.growth_interval());
  progress_.clear();
}

double GradScaler::get_scale() const { return enabled() ? scale_.item<float>() : 1.0; }

StepOutcome::operator bool() const {
  return !found_inf_.defined() || found_inf_.item<float>() == 0;
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("enabled", enabled());
  if (!enabled()) return;
  archive.write("scale", get_scale());
  archive.write("growth_factor", options_.growth_factor());
  archive.write("backoff_factor", options_.backoff_factor());
  archive.write("growth_interval", options_.growth_interval());
  archive.write("_growth_tracker", static_cast<int64_t>(growth_tracker_.item<int>()));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!enabled()) return;
  const auto read = [&](const std::string& name) {
    c10::IValue value;
    archive.read(name, value);
    return value;
  };
  DDP_CHECK_VALUE(
      read("enabled").toBool(),
      "GradScaler: expected the state of one that was enabled, got that of one that was not. "
      "Construct this one with enabled(false) as well, or do not load it.");
  auto options = options_;
  options.init_scale(read("scale").toDouble())
      .growth_factor(read("growth_factor").toDouble())
      .backoff_factor(read("backoff_factor").toDouble())
      .growth_interval(read("growth_interval").toInt());
  const auto tracker = read("_growth_tracker").toInt();
  check_options(options);
  options_ = options;
  scale_.fill_(options.init_scale());
  growth_tracker_.fill_(tracker);
  progress_.clear();
}

}  // namespace ddp
