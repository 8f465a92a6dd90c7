#include "sharded/passes/pass_notes.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "sharded/error_context.h"

namespace ddp {
namespace {

// First the number of each reduced unit in their order. Then for each unit its factor, its writes,
// and a word for each parameter.
constexpr int64_t kWrites = kSpreadWords;
constexpr int64_t kFlags = kWrites + kSpreadWords;

// As many as float32 has exactly.
float last_bits(uint64_t number) { return static_cast<float>(number & 0xffffff); }

float number_of(const ShardedUnit& unit) { return last_bits(static_cast<uint64_t>(unit.number())); }

std::string name_of(const PassNotes::Units& units, float number) {
  const auto found = find_if(units, [&](const auto& unit) { return number_of(*unit) == number; });
  return found == units.end() ? "another model" : (*found)->name();
}

std::string comparing_text() { return "FullyShardedDataParallel was comparing its reductions"; }

}  // namespace

PassNotes::PassNotes(
    const UnitGradients::Groups& groups, const Units& units, std::vector<size_t> order)
    : groups_(groups),
      order_(std::move(order)),
      first_words_{static_cast<int64_t>(units.size()) * kSpreadWords} {
  for (const auto& unit : units) {
    const auto flags = static_cast<int64_t>(unit->gradients().size());
    first_words_.push_back(first_words_.back() + kFlags + flags);
  }
  const auto device = units[order_.front()]->device();
  const bool is_alone = groups.ranks() == 1;
  runs_ahead_ = !is_alone && groups.wait_on_stream(device);
  const auto numel = first_words_.back();
  maxima_ = runs_ahead_ ? pinned_memory(numel, at::kFloat) : at::empty({numel}, at::kFloat);
  maxima_.zero_();
  write(units, maxima_.data_ptr<float>());
  if (!is_alone) exchange(device);
}

void PassNotes::write(const Units& units, float* words) const {
  auto* number = words;
  for (const auto index : order_) {
    const auto& unit = *units[index];
    write_spread(number_of(unit), std::exchange(number, number + kSpreadWords));
    const auto& notes = unit.gradients().notes();
    auto* const of_unit = words + first_words_[index];
    for (size_t i = 0; i < notes.has_gradient.size(); ++i) {
      of_unit[kFlags + static_cast<int64_t>(i)] = notes.has_gradient[i] ? 1 : 0;
    }
    write_spread(last_bits(notes.writes), of_unit + kWrites);
  }
  for (const auto& unit : units) {
    const auto factor = unit->gradients().notes().factor;
    const bool is_known = factor > 0 && contains(order_, unit->index);
    const auto value = is_known ? std::optional(static_cast<float>(factor)) : std::nullopt;
    write_spread(value, words + first_words_[unit->index]);
  }
}

void PassNotes::exchange(c10::Device device) {
  const c10::NoGradGuard no_grad;
  auto words = maxima_.to(device, /*non_blocking=*/runs_ahead_);
  for (const auto& group : {groups_.shard, groups_.replicate}) {
    if (!group || group->getSize() == 1) continue;
    with_context(comparing_text, group, [&] { all_reduce(words, c10d::ReduceOp::MAX, group); });
  }
  maxima_ = runs_ahead_ ? copy_down(words, copied_) : words.cpu();
}

const float* PassNotes::await() {
  // Polled, so that a rank that failed ends it.
  monitor_of(groups_.shard)->poll([&] { return copied_.is_over(); }, comparing_text);
  return maxima_.const_data_ptr<float>();
}

std::vector<bool> PassNotes::has_gradient(const ShardedUnit& unit) {
  const auto& own = unit.gradients().notes().has_gradient;
  bool are_all = true;
  for (size_t i = 0; i < own.size(); ++i) {
    are_all &= own[i] || !unit.gradients().parameter(i).requires_grad();
  }
  if (are_all) return own;
  const auto* const flags = await() + first_words_[unit.index] + kFlags;
  return std::vector<bool>(flags, flags + own.size());
}

void PassNotes::check(const Units& units) {
  const auto* const words = await();
  check_order(units, words);
  const auto refuse = [&](size_t index, const char* expected, const char* remedy) {
    const auto& name = units[index]->name();
    monitor_of(groups_.shard)
        ->throw_agreed(ddp::str("FullyShardedDataParallel: expected ", expected, name, remedy));
  };
  for (const auto index : order_) {
    const auto* const of_unit = words + first_words_[index];
    const auto writes = read_spread(of_unit + kWrites);
    if (writes->most != writes->least) {
      refuse(
          index, "forward to write the same to parameters on all ranks, got other values in ",
          ". An Embedding with max_norm changes the rows of its own batch: leave max_norm out, or "
          "normalize all rows between two steps.");
    }
    const auto factors = read_spread(of_unit);
    if (factors && differ_in_factor(*factors)) {
      refuse(
          index, "gradients to be scaled alike on all ranks, got those of ",
          " after the backward pass before scaled by different factors. LibTorch's "
          "clip_grad_norm_ knows the shards of one rank alone: call ddp::clip_grad_norm_(*model, "
          "max_norm).");
    }
  }
}

// Ranks whose forwards ran other units, of equal size, reduce them in other orders. The first
// difference shows what one of the ranks left out.
void PassNotes::check_order(const Units& units, const float* words) const {
  for (size_t k = 0; k < order_.size(); ++k) {
    const auto& unit = *units[order_[k]];
    const auto numbers = *read_spread(words + static_cast<int64_t>(k) * kSpreadWords);
    if (numbers.most == numbers.least) continue;
    const auto other = numbers.most == number_of(unit) ? numbers.least : numbers.most;
    const auto doing = [&] { return "reducing " + unit.name(); };
    monitor_of(groups_.shard)->abort_on_error(doing, [&] {
      DDP_CHECK(
          false,
          "FullyShardedDataParallel: expected every rank to run the same units in the same order, "
          "got gradients of ",
          unit.name(), " ", on_rank_text(*groups_.shard), " and of ", name_of(units, other),
          " on another. Run both on all ranks, and mask the result of one.");
    });
  }
}

}  // namespace ddp
