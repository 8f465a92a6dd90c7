// LibTorch's schedulers have no save and no load, and their interfaces do not expose their
// counters.
#include <memory>

#include <ddp/internal/check.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <ddp/internal/checkpoint_part.h>
#include "python/torch_file.h"

namespace ddp::detail {
namespace {

/// Exposes a protected member: a derived class may name it.
struct StepCount : torch::optim::LRScheduler {
  static constexpr unsigned torch::optim::LRScheduler::*kMember = &StepCount::step_count_;
};

using Plateau = torch::optim::ReduceLROnPlateauScheduler;

struct PlateauMembers {
  float Plateau::*best;
  int Plateau::*cooldown_counter;
  int Plateau::*last_epoch;
  int Plateau::*num_bad_epochs;
};

PlateauMembers plateau_members();

/// Exposes private members: an explicit instantiation may name them, and passes them to a friend.
template <
    float Plateau::*best, int Plateau::*cooldown_counter, int Plateau::*last_epoch,
    int Plateau::*num_bad_epochs>
struct NamePlateauMembers {
  friend PlateauMembers plateau_members() {
    return {best, cooldown_counter, last_epoch, num_bad_epochs};
  }
};

template struct NamePlateauMembers<
    &Plateau::best, &Plateau::cooldown_counter, &Plateau::last_epoch, &Plateau::num_bad_epochs>;

int64_t saved_count(const c10::IValue& saved, const char* name, const LoadContext& context) {
  const auto* value = find_in(saved, name);
  DDP_CHECK_VALUE(
      value != nullptr && value->isInt(), context.subject, ": expected a scheduler's \"", name,
      "\", got none. Add the part that was saved under this name.");
  return value->toInt();
}

class SchedulerPart : public CheckpointPart {
 public:
  explicit SchedulerPart(torch::optim::LRScheduler& scheduler) : scheduler_(scheduler) {}

  c10::IValue state() override {
    return make_dict({{kStepCount, static_cast<int64_t>(scheduler_.*StepCount::kMember)}});
  }

  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    const auto count = saved_count(saved, kStepCount, context);
    return {[this, count] { scheduler_.*StepCount::kMember = static_cast<unsigned>(count); }};
  }

 private:
  static constexpr const char* kStepCount = "step_count";

  torch::optim::LRScheduler& scheduler_;
};

class PlateauPart : public CheckpointPart {
 public:
  explicit PlateauPart(Plateau& scheduler) : scheduler_(scheduler) {}

  c10::IValue state() override {
    const auto members = plateau_members();
    return make_dict(
        {{kBest, static_cast<double>(scheduler_.*members.best)},
         {kCooldown, static_cast<int64_t>(scheduler_.*members.cooldown_counter)},
         {kLastEpoch, static_cast<int64_t>(scheduler_.*members.last_epoch)},
         {kBadEpochs, static_cast<int64_t>(scheduler_.*members.num_bad_epochs)}});
  }

  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    const auto* best = find_in(saved, kBest);
    DDP_CHECK_VALUE(
        best != nullptr && best->isDouble(), context.subject, ": expected a scheduler's \"", kBest,
        "\", got none. Add the part that was saved under this name.");
    const auto cooldown = saved_count(saved, kCooldown, context);
    const auto last_epoch = saved_count(saved, kLastEpoch, context);
    const auto bad_epochs = saved_count(saved, kBadEpochs, context);
    return {[this, cooldown, last_epoch, bad_epochs, best = best->toDouble()] {
      const auto members = plateau_members();
      scheduler_.*members.best = static_cast<float>(best);
      scheduler_.*members.cooldown_counter = static_cast<int>(cooldown);
      scheduler_.*members.last_epoch = static_cast<int>(last_epoch);
      scheduler_.*members.num_bad_epochs = static_cast<int>(bad_epochs);
    }};
  }

 private:
  // Python's names.
  static constexpr const char* kBest = "best";
  static constexpr const char* kCooldown = "cooldown_counter";
  static constexpr const char* kLastEpoch = "last_epoch";
  static constexpr const char* kBadEpochs = "num_bad_epochs";

  Plateau& scheduler_;
};

}  // namespace

CheckpointPartPtr part_of_scheduler(torch::optim::LRScheduler& scheduler) {
  return std::make_shared<SchedulerPart>(scheduler);
}

CheckpointPartPtr part_of_scheduler(Plateau& scheduler) {
  return std::make_shared<PlateauPart>(scheduler);
}

}  // namespace ddp::detail
