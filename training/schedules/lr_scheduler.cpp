#include <ddp/lr_scheduler.h>

#include <atomic>

#include <ddp/internal/check.h>
#include <torch/serialize.h>

namespace ddp {
namespace {

// Numbers schedules in the order of construction: the first one of an optimizer saw its initial
// rates.
uint64_t next_creation_number() {
  static std::atomic<uint64_t> creations{0};
  return ++creations;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, const char* name)
    : torch::optim::LRScheduler(optimizer),
      optimizer_(optimizer),
      name_(name),
      base_lrs_(get_current_lrs()),
      creation_number_(next_creation_number()) {}

std::vector<double> LRScheduler::get_lrs() {
  const auto epoch = static_cast<int64_t>(step_count_);
  auto lrs = epoch == 0 && follows_another_ ? first_lrs_in_sequence() : next_lrs(epoch);
  check_groups_are(lrs.size());
  return lrs;
}

void LRScheduler::check_groups_are(size_t count) const {
  const auto groups = optimizer_.param_groups().size();
  DDP_CHECK_VALUE(
      count == groups, name_, ": expected the parameter groups of its construction, ", count,
      ", got ", groups, ". Construct ", name_, " after the optimizer's last group.");
}

void LRScheduler::restart(bool follows_another) {
  step_count_ = 0;
  follows_another_ = follows_another;
  step();
}

void LRScheduler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step_count", torch::tensor(static_cast<int64_t>(step_count_)), /*is_buffer=*/true);
  archive.write("base_lrs", torch::tensor(base_lrs_, torch::kDouble), /*is_buffer=*/true);
}

void LRScheduler::load(torch::serialize::InputArchive& archive) {
  at::Tensor count;
  at::Tensor base;
  archive.read("step_count", count, /*is_buffer=*/true);
  archive.read("base_lrs", base, /*is_buffer=*/true);
  DDP_CHECK_VALUE(
      base.numel() == static_cast<int64_t>(base_lrs_.size()), name_, ": expected the state of ",
      base_lrs_.size(), " parameter groups, got that of ", base.numel(),
      ". Make the optimizer with the groups that it was saved with.");
  base = base.to(at::kDouble).contiguous();
  base_lrs_.assign(base.const_data_ptr<double>(), base.const_data_ptr<double>() + base.numel());
  step_count_ = static_cast<unsigned>(count.item<int64_t>());
}

void LRScheduler::set_lrs(const std::vector<double>& lrs) {
  auto& groups = optimizer_.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(lrs[i]);
}

double scaled_lr(double base, const GroupArg& group) { return base * get_world_size(group); }

}  // namespace ddp
