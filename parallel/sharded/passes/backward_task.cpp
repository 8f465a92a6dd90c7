#include "sharded/passes/backward_task.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/repeated_call.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "sharded/block_pool.h"
#include "sharded/error_context.h"
#include "sharded/passes/pass_notes.h"

namespace ddp {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kBeforeAll = -1;

std::string reducing_text(const ShardedUnit& unit) {
  return "FullyShardedDataParallel was reducing " + unit.name();
}

}  // namespace

BackwardTask::BackwardTask(ShardedModel& model)
    : model_(model),
      reduces_early_(model.may_reduce_early()),
      gradients_service_(model.serve_gradients()) {
  for (const auto& unit : model.units()) unit->gradients().begin();
}

void BackwardTask::watch_end() {
  if (!watched_.insert(torch::autograd::get_current_graph_task_id()).second) return;
  const auto model = model_.shared_from_this();
  at_backward_end(
      [model] { model->end_backward(/*has_failed=*/false); },
      [model](const std::exception_ptr& /*cause*/) { model->end_backward(/*has_failed=*/true); });
  // Before a node that saved a parameter as a shard finds the memory of the whole, which is freed.
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!nodes || (wanted && !wanted->empty())) return;
  for (const auto& unit : model_.units()) unit->refuse_shards_in(*nodes);
}

// Asks autograd which nodes it wants: with torch::autograd::grad() not ours.
bool BackwardTask::accumulates() const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (!wanted || wanted->empty()) return true;
  for (const auto& unit : model_.units()) {
    if (unit->takes_gradients(*wanted)) return true;
  }
  return false;
}

BackwardTask::Walk& BackwardTask::walk(const std::shared_ptr<ForwardPass>& pass) {
  const auto at = find_if(walks_, [&](const Walk& walk) { return walk.pass == pass; });
  if (at != walks_.end()) return *at;
  // Autograd gets to an earlier forward pass when it has done with the later ones.
  for (auto& later : walks_) gather_skipped_uses(later, kBeforeAll, kBeforeAll);
  if (walks_.empty()) accumulates_ = accumulates();
  begin_walk(pass);
  return walks_.back();
}

void BackwardTask::begin_walk(const std::shared_ptr<ForwardPass>& pass) {
  Walk walk{pass, {}, 0, kNever};
  const auto& order = pass->order;
  std::vector<ShardedUnit*> kept;
  for (const auto use : order.backward()) {
    const auto index = order.use(use).unit;
    auto& unit = model_.unit(index);
    if (!model_.keeps_whole(unit, *pass)) {
      walk.gathers.push_back(use);
      continue;
    }
    unit.needed_since = order.first_entry(index);
    unit.begin_gather();
    kept.push_back(&unit);
  }
  // At once: after their own forward, forward of the root may have used their parameters, too.
  for (auto* unit : kept) unit->make_whole();
  walks_.push_back(std::move(walk));
  order_ = reduction_order();
}

std::vector<size_t> BackwardTask::reduction_order() const {
  std::vector<size_t> order;
  // The oldest forward pass decides, and of a pass what was entered first is reduced last.
  for (auto walk = walks_.rbegin(); walk != walks_.rend(); ++walk) {
    for (const auto unit : walk->pass->order.units()) {
      if (!model_.unit(unit).gradients().has_trainable()) continue;
      if (!contains(order, unit)) order.push_back(unit);
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

void BackwardTask::enter(const std::shared_ptr<ForwardPass>& pass, size_t use) {
  auto& walk = this->walk(pass);
  const auto& order = pass->order;
  gather_skipped_uses(walk, order.use(use).exit, order.end_of(use));
  auto& unit = model_.unit(order.use(use).unit);
  unit.make_whole();
  if (!model_.keeps_whole(unit, *pass)) unit.needed_since = order.begin_of(use);
  if (walk.next < walk.gathers.size() && walk.gathers[walk.next] == use) ++walk.next;
  gather_ahead(walk);
}

void BackwardTask::leave(const std::shared_ptr<ForwardPass>& pass, size_t use) {
  auto& walk = this->walk(pass);
  const auto entry = pass->order.use(use).entry;
  gather_skipped_uses(walk, entry, entry);
  // The rest was computed before forward, from the parameters as they were then.
  if (use == 0) hide_units();
}

void BackwardTask::hide_units() {
  for (const auto& unit : model_.units()) {
    if (!unit->stays_whole) unit->hide_whole();
  }
}

ShardedModel::Place BackwardTask::enter_again(ShardedUnit& unit, bool reduces) {
  watch_end();
  if (walks_.empty()) {
    // The root itself is computed again, by a pass of its own.
    auto pass = std::make_shared<ForwardPass>();
    pass->root = unit.index;
    pass->reduces = reduces;
    pass->is_recomputation = true;
    walk(pass);
  }
  const auto& pass = walks_.back().pass;
  ShardedModel::Place place{pass, PassOrder::npos, /*is_recomputed=*/true};
  if (pass->is_recomputation) {
    place.use = pass->order.enter(unit.index, /*has_backward=*/false, /*call=*/0);
  } else {
    place.use = pass->order.last_in_call(unit.index, repeated_call());
    if (place.use != PassOrder::npos) {
      enter(pass, place.use);
      return place;
    }
  }
  unit.needed_since = 0;
  unit.make_whole();
  return place;
}

void BackwardTask::on_repeated_exit(const ShardedModel::Place& place, ShardedUnit& unit) {
  const auto& pass = *place.pass;
  // Where the call uses it once more, ranks that do not compute the call again keep it, too.
  const bool is_needed =
      !pass.is_recomputation && place.use != PassOrder::npos &&
      (model_.keeps_whole(unit, pass) || pass.order.is_one_of_several(place.use));
  if (!is_needed && !unit.stays_whole) unit.release();
}

void BackwardTask::gather_skipped_uses(Walk& walk, int64_t exit, int64_t time) {
  const auto& order = walk.pass->order;
  const auto is_left = [&] { return walk.next < walk.gathers.size(); };
  while (is_left() && order.use(walk.gathers[walk.next]).exit > exit) {
    const auto left_out = walk.gathers[walk.next++];
    auto& unit = model_.unit(order.use(left_out).unit);
    unit.make_whole();
    const auto begin = order.begin_of(left_out);
    if (!model_.keeps_whole(unit, *walk.pass)) unit.needed_since = begin;
    // Other units' work inside of it comes before its end.
    const auto next_end = is_left() ? order.end_of(walk.gathers[walk.next]) : kBeforeAll;
    mark_done_since(walk, std::max({begin, next_end, time}));
  }
  mark_done_since(walk, time);
}

void BackwardTask::mark_done_since(Walk& walk, int64_t time) {
  walk.released_since = std::min(walk.released_since, time);
  for (const auto& used : walk.pass->order.units()) {
    auto& unit = model_.unit(used);
    if (unit.is_whole() && unit.needed_since >= walk.released_since && !unit.stays_whole) {
      unit.release();
    }
  }
  reduce_ready();
}

void BackwardTask::gather_ahead(Walk& walk) {
  if (walk.next == walk.gathers.size()) return trim_blocks();  // nothing needs the others any more
  if (model_.prefetch() == 0) return;
  model_.unit(walk.pass->order.use(walk.gathers[walk.next]).unit).begin_gather();
}

void BackwardTask::on_gradient(ShardedUnit& unit) {
  DDP_CHECK(
      !unit.gradients().is_reduced(), "FullyShardedDataParallel: expected the gradients of ",
      unit.name(), " before they were summed over the ranks, got one after that, on rank ",
      unit.groups().shard->getRank(), ". Call forward of the root again for another graph.");
  if (accumulates_whole()) unit.gradients().fold();
  if (unit.gradients().is_complete()) reduce_ready();
}

bool BackwardTask::accumulates_whole() const {
  return !walks_.empty() && none_of(walks_, [](const Walk& walk) { return walk.pass->reduces; });
}

void BackwardTask::reduce_ready() {
  if (!reduces_early_ || !accumulates_ || walks_.size() != 1 || !walks_[0].pass->reduces) return;
  const auto& walk = walks_[0];
  for (const auto index : order_) {
    auto& unit = model_.unit(index);
    if (unit.gradients().is_reduced()) continue;
    const bool is_done = walk.pass->order.first_entry(index) >= walk.released_since;
    if (!is_done && !unit.gradients().is_complete()) return;
    reduce(unit);
  }
}

void BackwardTask::reduce(ShardedUnit& unit) {
  finish_packed();  // one at a time has its memory
  const auto& groups = model_.reduce_groups();
  with_context(
      [&] { return reducing_text(unit); }, groups.shard,
      [&] { unit.gradients().reduce(groups, model_.packed_memory(unit.gradients())); });
  unit.owes_reduction = false;
  ++unit.stats.reductions;
  unit.stats.bytes += unit.gradients().reduced_bytes();
  reducing_ = &unit;
}

void BackwardTask::finish_packed() {
  auto* const unit = std::exchange(reducing_, nullptr);
  if (unit) in_reduction(*unit, &UnitGradients::finish_packed);
}

void BackwardTask::in_reduction(ShardedUnit& unit, Step step) const {
  const auto& groups = model_.reduce_groups();
  with_context(
      [&] { return reducing_text(unit); }, groups.shard, [&] { (unit.gradients().*step)(groups); });
}

void BackwardTask::finish() {
  for (auto& walk : walks_) gather_skipped_uses(walk, kBeforeAll, kBeforeAll);
  const bool reduces =
      accumulates_ &&
      (walks_.empty() || any_of(walks_, [](const Walk& w) { return w.pass->reduces; }));
  order_ = reduction_order();
  // And units that passes without reduction called, or whose parameters got gradients without
  // forward.
  for (const auto& unit : model_.units()) {
    const bool is_known = contains(order_, unit->index);
    const bool is_due = unit->owes_reduction || unit->gradients().has_begun();
    if (!is_known && is_due) order_.push_back(unit->index);
    if (is_known && !reduces) unit->owes_reduction = true;
  }
  for (const auto index : order_) {
    auto& unit = model_.unit(index);
    if (reduces && !unit.gradients().is_reduced()) reduce(unit);
  }
  finish_packed();
  std::shared_ptr<PassNotes> notes;
  if (reduces && !order_.empty()) {
    notes = std::make_shared<PassNotes>(model_.reduce_groups(), model_.units(), order_);
  }
  for (const auto& unit : model_.units()) {
    in_reduction(*unit, &UnitGradients::finish_reduction);
  }
  if (notes) model_.compare(notes);
  const bool runs_root = any_of(walks_, [](const Walk& walk) { return walk.pass->root == 0; });
  if (reduces && runs_root) model_.broadcast_buffers();
  for (const auto& unit : model_.units()) {
    auto& gradients = unit->gradients();
    if (gradients.is_reduced()) {
      gradients.add_to_shards(notes->has_gradient(*unit));
    } else {
      gradients.keep_whole();
    }
    if (!unit->stays_whole) unit->reshard();
    unit->await_uploads();
  }
  trim_blocks();
}

void BackwardTask::fail() noexcept {
  model_.part_with_packed_memory();
  for (const auto& unit : model_.units()) {
    unit->gradients().restore();
    if (!unit->stays_whole) unit->abandon();
  }
}

}  // namespace ddp
