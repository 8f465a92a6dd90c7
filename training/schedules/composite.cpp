// Schedules that are made of others: the initial rates and the states of their parts.
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

void LRScheduler::check_parts() const {
  const auto all = parts();
  DDP_CHECK_VALUE(!all.empty(), name_, ": expected at least one scheduler, got none.");
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* scheduler = all[i];
    DDP_CHECK_VALUE(
        scheduler != nullptr && &scheduler->optimizer() == &optimizer_, name_,
        ": expected schedulers of its own optimizer, got ",
        scheduler ? "one of another" : "nullptr", " for number ", i, ".");
    DDP_CHECK_VALUE(
        scheduler->last_epoch() == 0, name_, ": expected schedulers at epoch 0, got number ", i,
        ", a ", scheduler->name_, ", at epoch ", scheduler->last_epoch(),
        ". Construct it before any step().");
    scheduler->check_groups();
  }
}

std::vector<LRScheduler*> LRScheduler::parts_by_creation() const {
  auto all = parts();
  std::sort(all.begin(), all.end(), [](const auto* a, const auto* b) {
    return a->creation_number_ < b->creation_number_;
  });
  return all;
}

void LRScheduler::share_base_lrs() {
  // A part that has parts was constructed after them.
  std::vector<LRScheduler*> all;
  for (auto* part : parts()) {
    all.push_back(part);
    for (auto* inner : part->parts()) all.push_back(inner);
  }
  std::sort(all.begin(), all.end(), [](const auto* a, const auto* b) {
    return a->creation_number_ < b->creation_number_;
  });
  auto initial = all.front()->base_lrs_;
  for (auto* part : all) {
    if (part->sets_initial_lrs()) {
      initial = part->base_lrs_;
    } else if (!part->has_own_base_lrs()) {
      part->base_lrs_ = initial;
    }
  }
  base_lrs_ = std::move(initial);
}

void LRScheduler::save_parts(torch::serialize::OutputArchive& archive) const {
  LRScheduler::save(archive);
  const auto all = parts();
  for (size_t i = 0; i < all.size(); ++i) {
    torch::serialize::OutputArchive of_one(archive.compilation_unit());
    all[i]->save(of_one);
    archive.write(key_of(i), of_one);
  }
}

void LRScheduler::load_parts(torch::serialize::InputArchive& archive) {
  const auto all = parts();
  std::vector<torch::serialize::InputArchive> of_each(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    DDP_CHECK_VALUE(
        archive.try_read(key_of(i), of_each[i]), name_, ": expected the state of ", all.size(),
        " schedulers, got that of ", i, ". Make it of the schedulers that it was saved with.");
  }
  LRScheduler::load(archive);
  for (size_t i = 0; i < all.size(); ++i) all[i]->load(of_each[i]);
}

ChainedScheduler::ChainedScheduler(
    torch::optim::Optimizer& optimizer, std::vector<LRScheduler*> schedulers)
    : LRScheduler(optimizer, "ChainedScheduler"), schedulers_(std::move(schedulers)) {
  check_parts();
  for (size_t i = 0; i < schedulers_.size(); ++i) {
    DDP_CHECK_VALUE(
        dynamic_cast<ChainedScheduler*>(schedulers_[i]) == nullptr,
        "ChainedScheduler: expected schedulers that are not chained themselves, got one for "
        "number ",
        i, ". List its schedulers here.");
  }
  share_base_lrs();
  step();
}

ChainedScheduler::ChainedScheduler(std::vector<LRScheduler*> schedulers)
    : ChainedScheduler(optimizer_of(schedulers), schedulers) {}

torch::optim::Optimizer& ChainedScheduler::optimizer_of(
    const std::vector<LRScheduler*>& schedulers) {
  DDP_CHECK_VALUE(
      !schedulers.empty() && schedulers.front() != nullptr,
      "ChainedScheduler: expected at least one scheduler, got none.");
  return schedulers.front()->optimizer();
}

std::vector<double> ChainedScheduler::next_lrs(int64_t epoch) {
  if (epoch > 0) {
    for (auto* scheduler : schedulers_) scheduler->step();
    return get_last_lr();
  }
  // The constructors' first steps once more, now from the initial rates.
  set_lrs(base_lrs());
  for (auto* scheduler : parts_by_creation()) scheduler->restart(/*follows_another=*/false);
  return get_last_lr();
}

void ChainedScheduler::save(torch::serialize::OutputArchive& archive) const { save_parts(archive); }

void ChainedScheduler::load(torch::serialize::InputArchive& archive) { load_parts(archive); }

}  // namespace ddp
