#include <algorithm>

#include <ddp/internal/check.h>
#include <ddp/lr_scheduler.h>

namespace ddp {

SequentialLR::SequentialLR(
    torch::optim::Optimizer& optimizer, std::vector<LRScheduler*> schedulers,
    std::vector<int64_t> milestones)
    : LRScheduler(optimizer, "SequentialLR"),
      schedulers_(std::move(schedulers)),
      milestones_(std::move(milestones)) {
  DDP_CHECK_VALUE(!schedulers_.empty(), "SequentialLR: expected at least one scheduler, got none.");
  DDP_CHECK_VALUE(
      milestones_.size() + 1 == schedulers_.size(), "SequentialLR: expected ",
      schedulers_.size() - 1, " milestones for ", schedulers_.size(), " schedulers, got ",
      milestones_.size(), ".");
  DDP_CHECK_VALUE(
      std::is_sorted(milestones_.begin(), milestones_.end()) &&
          (milestones_.empty() || milestones_.front() >= 1),
      "SequentialLR: expected milestones that rise, from 1 on, got ", at::IntArrayRef(milestones_),
      ".");
  check_parts();
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    DDP_CHECK_VALUE(
        schedulers_[i]->parts().empty(),
        "SequentialLR: expected schedulers that have none themselves, got a ",
        schedulers_[i]->name(), " for number ", i, ". List its schedulers here.");
  }
  share_base_lrs();
  step();
}

std::vector<double> SequentialLR::next_lrs(int64_t epoch) {
  if (epoch == 0) {
    set_lrs(base_lrs());
    schedulers_.front()->restart(/*follows_another=*/false);
    return get_last_lr();
  }
  const auto next = std::upper_bound(milestones_.begin(), milestones_.end(), epoch);
  auto* scheduler = schedulers_[static_cast<size_t>(next - milestones_.begin())];
  if (next != milestones_.begin() && *(next - 1) == epoch) {
    scheduler->restart(/*follows_another=*/true);
  } else {
    scheduler->step();
  }
  return get_last_lr();
}

void SequentialLR::save(torch::serialize::OutputArchive& archive) const { save_parts(archive); }

void SequentialLR::load(torch::serialize::InputArchive& archive) { load_parts(archive); }

}  // namespace ddp
