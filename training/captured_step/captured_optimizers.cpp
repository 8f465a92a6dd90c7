#include "captured_step/captured_optimizers.h"

#include <string>
#include <string_view>
#include <tuple>
#include <typeinfo>

#include <ddp/fused_optimizer.h>
#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/text.h>
#include <ddp/zero.h>

namespace ddp {
namespace {

// The optimizer whose step runs: with ZeRO, that of this rank's part.
torch::optim::Optimizer& stepped(torch::optim::Optimizer& optimizer) {
  auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
  return zero ? zero->local_optimizer() : optimizer;
}

// "torch::optim::AdamW", if a step of this class computes on the host; else "".
std::string host_bound_class(const torch::optim::Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  std::string name;
  with_kind(optimizer, [&](auto kind) {
    using Optimizer = typename decltype(kind)::Optimizer;
    using Options = typename decltype(kind)::Options;
    constexpr bool is_on_device = std::is_same_v<Optimizer, torch::optim::SGD> ||
                                  std::is_same_v<Optimizer, torch::optim::RMSprop>;
    constexpr bool is_ours = std::is_base_of_v<detail::ListedOptions<Options>, Options>;
    if (type != typeid(Optimizer) || is_on_device) return;
    name = ddp::str(is_ours ? "ddp" : "torch", "::optim::", kind.name);
  });
  return name;
}

/// Collects the numbers of options that a step reads on the host.
struct FrozenNumbers : NoFields {
  explicit FrozenNumbers(bool leaves_rate_out) : without_rate(leaves_rate_out) {}

  void number(const char* name, double value) {
    if (without_rate && name == std::string_view("lr")) return;
    found.emplace_back(name, value);
  }
  void pair(const char* name, const std::tuple<double, double>& values) {
    number(name, std::get<0>(values));
    number(name, std::get<1>(values));
  }
  void flag(const char* name, bool value) { number(name, value ? 1 : 0); }

  bool without_rate;
  std::vector<std::pair<const char*, double>> found;
};

const void* state_of(
    const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  for (const auto& p : parameters) {
    const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
    if (found != optimizer.state().end()) return found->second.get();
  }
  return nullptr;
}

}  // namespace

CapturedOptimizers::CapturedOptimizers(std::vector<torch::optim::Optimizer*> optimizers)
    : optimizers_(std::move(optimizers)) {
  for (auto* optimizer : optimizers_) {
    DDP_CHECK_VALUE(
        optimizer, "CapturedStep: expected optimizers, got a null pointer. Leave it out.");
    const auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer);
    DDP_CHECK_VALUE(
        !zero || (!zero->options().offload() && !zero->options().offload_file()),
        "CapturedStep: expected an optimizer whose step runs on the device alone, got a "
        "ZeroRedundancyOptimizer with offload, which steps on the host. Leave offload out, or step "
        "it after each call.");
    const auto name = host_bound_class(stepped(*optimizer));
    DDP_CHECK_VALUE(
        name.empty(),
        "CapturedStep: expected an optimizer whose step runs on the device alone, got ", name,
        ", which counts steps on the host. Use SGD, a fused optimizer of ddp::optim, or step it "
        "after each call.");
  }
}

CapturedOptimizers::Capture::Capture(CapturedOptimizers& owner) : owner_(owner) {
  owner_.begin_capture();
}

void CapturedOptimizers::begin_capture() {
  for (auto* optimizer : optimizers_) {
    if (auto* fused = dynamic_cast<FusedOptimizer*>(&stepped(*optimizer))) fused->begin_capture();
  }
}

void CapturedOptimizers::end_capture() noexcept {
  for (auto* optimizer : optimizers_) {
    if (auto* fused = dynamic_cast<FusedOptimizer*>(&stepped(*optimizer))) fused->end_capture();
  }
}

void CapturedOptimizers::freeze() {
  frozen_.clear();
  for (auto* optimizer : optimizers_) frozen_.push_back(frozen(stepped(*optimizer)));
}

std::vector<CapturedOptimizers::Frozen> CapturedOptimizers::frozen(
    torch::optim::Optimizer& optimizer) {
  std::vector<Frozen> groups;
  for (auto& group : optimizer.param_groups()) {
    FrozenNumbers numbers(dynamic_cast<FusedOptimizer*>(&optimizer) != nullptr);
    with_kind(group.options(), [&](auto kind, auto& own) {
      if constexpr (decltype(kind)::kStepsEachParameter) visit_options(numbers, own);
    });
    numbers.found.emplace_back("parameters", static_cast<double>(group.params().size()));
    groups.push_back({std::move(numbers.found), state_of(optimizer, group.params())});
  }
  return groups;
}

void CapturedOptimizers::prepare_replay() {
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    auto& optimizer = stepped(*optimizers_[i]);
    const auto now = frozen(optimizer);
    const auto& then = frozen_[i];
    DDP_CHECK(
        now.size() == then.size(), "CapturedStep: expected the ", then.size(), " groups that ",
        "optimizer ", i, " had when the step was captured, got ", now.size(),
        ". Make a new CapturedStep after adding one.");
    for (size_t g = 0; g < now.size(); ++g) {
      DDP_CHECK(
          now[g].state == then[g].state, "CapturedStep: expected the states that optimizer ", i,
          " had when the step was captured, whose memory the graph has, got others in group ", g,
          ". Make a new CapturedStep after loading.");
      for (size_t n = 0; n < now[g].numbers.size(); ++n) {
        const auto& [name, value] = now[g].numbers[n];
        DDP_CHECK(
            value == then[g].numbers[n].second,
            "CapturedStep: expected the options that optimizer ", i,
            " had when the step was captured, for the graph repeats them, got ", name, " = ", value,
            " in place of ", then[g].numbers[n].second, " in group ", g,
            ". Take an optimizer of ddp::optim, whose rate may change, or make a new "
            "CapturedStep.");
      }
    }
    if (auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer)) fused->refresh_numbers();
  }
}

}  // namespace ddp
