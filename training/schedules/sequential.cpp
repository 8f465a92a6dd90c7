#include <algorithm>
#include <string>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/lr_scheduler.h>
#include <torch/serialize.h>

namespace ddp {
namespace {

std::string key_of(size_t scheduler) { return ddp::str("scheduler", scheduler); }

}  // namespace

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
  check_schedulers();
  share_base_lrs();
  step();
}

void SequentialLR::check_schedulers() const {
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    const auto* scheduler = schedulers_[i];
    DDP_CHECK_VALUE(
        scheduler != nullptr && &scheduler->optimizer() == &optimizer(),
        "SequentialLR: expected schedulers of its own optimizer, got ",
        scheduler ? "one of another" : "nullptr", " for number ", i, ".");
    DDP_CHECK_VALUE(
        dynamic_cast<const SequentialLR*>(scheduler) == nullptr,
        "SequentialLR: expected schedulers that are none themselves, got one for number ", i,
        ". List its schedulers here.");
    DDP_CHECK_VALUE(
        scheduler->last_epoch() == 0, "SequentialLR: expected schedulers at epoch 0, got number ",
        i, ", a ", scheduler->name(), ", at epoch ", scheduler->last_epoch(),
        ". Construct it before any step().");
  }
}

// Gives all schedules the initial rates, because each constructor changed the rates that the next
// one found.
void SequentialLR::share_base_lrs() {
  auto by_creation = schedulers_;
  std::sort(by_creation.begin(), by_creation.end(), [](const auto* a, const auto* b) {
    return a->creation_number_ < b->creation_number_;
  });
  auto initial = by_creation.front()->base_lrs();
  for (auto* scheduler : by_creation) {
    if (scheduler->has_own_base_lrs()) {
      initial = scheduler->base_lrs();
    } else {
      scheduler->set_base_lrs(initial);
    }
  }
  set_base_lrs(std::move(initial));
}

std::vector<double> SequentialLR::next_lrs(int64_t epoch) {
  if (epoch == 0) {
    auto& groups = optimizer().param_groups();
    for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(base_lrs()[i]);
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

void SequentialLR::save(torch::serialize::OutputArchive& archive) const {
  LRScheduler::save(archive);
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    torch::serialize::OutputArchive of_one(archive.compilation_unit());
    schedulers_[i]->save(of_one);
    archive.write(key_of(i), of_one);
  }
}

void SequentialLR::load(torch::serialize::InputArchive& archive) {
  std::vector<torch::serialize::InputArchive> of_each(schedulers_.size());
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    DDP_CHECK_VALUE(
        archive.try_read(key_of(i), of_each[i]), "SequentialLR: expected the state of ",
        schedulers_.size(), " schedulers, got that of ", i,
        ". Make it of the schedulers that it was saved with.");
  }
  LRScheduler::load(archive);
  for (size_t i = 0; i < schedulers_.size(); ++i) schedulers_[i]->load(of_each[i]);
}

}  // namespace ddp
