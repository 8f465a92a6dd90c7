#include "sharded/sharded_model.h"

#include <set>
#include <utility>

#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/parameter_memory.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/repeated_call.h>
#include <ddp/internal/tensor_broadcast.h>
#include <ddp/internal/tensor_memory.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "sharded/block_pool.h"
#include "sharded/error_context.h"
#include "sharded/own_group.h"
#include "sharded/passes/backward_task.h"
#include "sharded/passes/pass_notes.h"
#include "sharded/passes/unit_nodes.h"

namespace ddp {
namespace {

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// \param by_rank  names of units, a line each.
std::string describe_orders(const std::vector<std::string>& by_rank, int64_t pass) {
  const auto rank = first_different_rank(by_rank);
  if (rank == 0) return "";
  const auto [first, other] = different_lines(by_rank[0], by_rank[rank]);
  return ddp::str(
      "FullyShardedDataParallel: expected every rank to run the same units in the same order, got ",
      first, " on rank 0 and ", other, " on rank ", rank, " in forward ", pass,
      ". Run it on all ranks and mask its result.");
}

std::string describe_kinds(const std::vector<std::string>& by_rank) {
  const auto rank = first_different_rank(by_rank);
  if (rank == 0) return "";
  return ddp::str(
      "FullyShardedDataParallel: expected every rank to run the same kind of forward, got ",
      by_rank[0], " on rank 0 and ", by_rank[rank], " on rank ", rank,
      ". Evaluation is collective, too: run equal numbers of batches, ddp::equal_batches().");
}

void tell_models(const torch::autograd::edge_list& roots, const std::exception_ptr& cause) {
  for (const auto& pass : passes_of(roots)) {
    if (pass->model) pass->model->backward_failed(cause);
  }
}

}  // namespace

FailedPasses::FailedPasses(const ProcessGroup& group)
    : monitor_(monitor_of(group)),
      forwards_(
          monitor_, {"began a forward pass of a sharded model that",
                     "Forward of a sharded model is collective, in evaluation, too: run it on "
                     "every rank, equally often, ddp::equal_batches()"}) {
  set_backward_failed(&tell_models);
}

void FailedPasses::begin() {
  forwards_.await_failures();
  forwards_.restart();
  is_noted_ = false;
}

void FailedPasses::note(const char* doing, const std::exception_ptr& cause) noexcept {
  try {
    if (std::exchange(is_noted_, true) || monitor_->aborted()) return;
    forwards_.fail(ddp::str(
        doing, " of a sharded model threw on ", monitor_->rank_text(), ": ", text_of(cause)));
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

ShardedModel::ShardedModel(const ShardedUnit& root, int64_t prefetch)
    : prefetch_(prefetch),
      gather_group_(root.gather_group()),
      reduce_groups_{
          own_group_of(root.groups().shard, OwnOrder::Reductions).group,
          own_group_of(root.groups().replicate, OwnOrder::Reductions).group},
      failed_passes_(gather_group_),
      settling_(std::make_shared<std::function<void()>>([this] { settle(); })) {
  monitor_of(gather_group_)->add_settling(settling_);
}

ShardedModel::~ShardedModel() { trim_blocks(); }

// Autograd has a thread for each device: it would not keep the order of units on two.
void ShardedModel::check_device(const ShardedUnit& unit) const {
  if (!unit.has_parameters()) return;
  for (const auto& other : units_) {
    DDP_CHECK_VALUE(
        !other->has_parameters() || unit.device() == other->device(),
        "FullyShardedDataParallel: expected all units of a model on one device, got ",
        other->name(), " on ", other->device(), " and ", unit.name(), " on ", unit.device(), " ",
        on_rank_text(*gather_group_), ". Move the module to one device before.");
  }
}

void ShardedModel::add(const std::shared_ptr<ShardedUnit>& unit) {
  unit->index = units_.size();
  unit->set_model(shared_from_this());
  units_.push_back(unit);
}

void ShardedModel::adopt(ShardedModel& other, const std::string& path) {
  DDP_CHECK(
      other.is_idle(), "FullyShardedDataParallel: expected no forward or backward of ", path,
      " while it is wrapped, ", on_rank_text(*gather_group_), ".");
  for (const auto& unit : other.units()) check_device(*unit);
  for (const auto& unit : std::exchange(other.units_, {})) {
    auto& name = unit->stats.name;
    name = name.empty() ? path : path + "." + name;
    add(unit);
  }
}

c10::Device ShardedModel::device() const {
  const auto found = find_if(units_, [](const auto& unit) { return unit->has_parameters(); });
  return found == units_.end() ? c10::Device(c10::kCPU) : (*found)->device();
}

bool ShardedModel::keeps_whole(const ShardedUnit& unit, const ForwardPass& pass) const {
  return unit.stays_whole || !unit.reshard_after_forward.value_or(unit.index != pass.root);
}

void ShardedModel::hold() {
  is_held_ = true;
  expects_reduction_ = false;
  for (const auto& unit : units_) {
    if (unit->stays_whole || unit->reshard_after_forward) continue;
    unit->reshard();  // what a pass left may be old
    unit->stays_whole = true;
    held_.push_back(unit);
  }
}

void ShardedModel::drop() noexcept {
  is_held_ = false;
  for (const auto& unit : std::exchange(held_, {})) {
    unit->stays_whole = false;
    try {
      unit->reshard();
      unit->await_uploads();
    } catch (const std::exception&) {
      unit->abandon();  // a gather that failed: its group is aborted
    }
  }
}

void ShardedModel::forget_graphs() {
  const auto is_over = [](const std::weak_ptr<ForwardPass>& graph) {
    const auto pass = graph.lock();
    return !pass || pass->is_released;
  };
  drop_if(graphs_, is_over);
}

bool ShardedModel::runs_through_several() const {
  if (graphs_.size() < 2) return false;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  int64_t passes = 0;
  for (const auto& graph : graphs_) {
    const auto pass = graph.lock();
    const auto begin = pass ? pass->begin.lock() : nullptr;
    if (begin && nodes && nodes->count(begin.get()) > 0) ++passes;
  }
  return passes != 1;  // 0: a graph that is computed again, inside one that is not known here
}

bool ShardedModel::may_reduce_early() {
  const bool reduces = std::exchange(expects_reduction_, false);
  // Gradients of values that were computed from whole parameters before forward come after it.
  const bool is_summoned =
      !is_held_ && any_of(units_, [](const auto& unit) { return unit->stays_whole; });
  forget_graphs();
  return (reduces || !is_held_) && !runs_through_several() && !is_summoned;
}

void ShardedModel::compare(std::shared_ptr<PassNotes> notes) {
  const auto due = notes->runs_ahead() ? std::exchange(unread_, notes) : notes;
  if (due) due->check(units_);
}

void ShardedModel::settle() {
  if (const auto due = std::exchange(unread_, nullptr)) due->check(units_);
}

void ShardedModel::begin_pass(ShardedUnit& root, bool reduces) {
  DDP_CHECK(
      !task_, "FullyShardedDataParallel: expected the backward pass before to have ended, ",
      on_rank_text(*gather_group_), ". Call forward and backward of a model on one thread.");
  for (const auto& unit : units_) unit->check_may_capture();
  failed_passes_.begin();
  // Parameters gathered before the last optimizer step are stale.
  for (const auto& unit : units_) {
    if (!unit->stays_whole) unit->reshard();
  }
  compare_modes();
  pass_ = std::make_shared<ForwardPass>();
  pass_->model = shared_from_this();
  pass_->root = root.index;
  pass_->reduces = reduces;
  for (const auto& unit : units_) pass_->used_shards.push_back(unit->used_shards());
  is_as_expected_ = true;
}

ShardedModel::Place ShardedModel::enter(ShardedUnit& unit, bool reduces) {
  if (is_in_backward()) {
    auto& task = this->task();
    unit.add_hooks();
    return task.enter_again(unit, reduces);
  }
  if (depth_ == 0) begin_pass(unit, reduces);
  ++depth_;
  const auto call = repeated_call();  // whose graph ends with it
  const bool has_graph = c10::GradMode::is_enabled() && call == 0;
  Place place{pass_, pass_->order.enter(unit.index, has_graph || call != 0, call)};
  if (depth_ == 1 && has_graph) pass_->begin = marker_ = begin_marker(units_[unit.index], place);
  try {
    unit.make_whole();
    unit.add_hooks();
    gather_ahead(unit);
  } catch (...) {
    abandon(unit, place);
    throw;
  }
  return place;
}

void ShardedModel::gather_ahead(ShardedUnit& unit) {
  const auto at = pass_->order.uses().size() - 1;
  is_as_expected_ = is_as_expected_ && at < expected_.size() && expected_[at] == unit.index;
  if (!is_as_expected_ || prefetch_ == 0 || at + 1 == expected_.size()) return;
  units_[expected_[at + 1]]->begin_gather();
}

NodePtr ShardedModel::mark_exit(const std::shared_ptr<ShardedUnit>& unit, const Place& place) {
  if (place.is_recomputed || !place.pass->order.use(place.use).has_backward) return {};
  marker_ = exit_marker(unit, place, marker_);
  return marker_;
}

void ShardedModel::check_shards_unused(const Place& place) const {
  if (depth_ > 1 || place.is_recomputed || !c10::GradMode::is_enabled()) return;
  for (const auto& unit : units_) {
    const auto& before = place.pass->used_shards[unit->index];
    const auto used = unit->used_shards();
    for (size_t i = 0; i < used.size(); ++i) {
      DDP_CHECK(
          !used[i] || before[i],
          "FullyShardedDataParallel: expected parameters to be used in forward of their unit, got ",
          unit->text_of_parameter(i), " used outside of it in forward of ",
          units_[place.pass->root]->name(), " ", on_rank_text(*gather_group_),
          ", where it is this rank's shard. Put what uses it into forward of its unit.");
    }
  }
}

void ShardedModel::leave(ShardedUnit& unit, const Place& place) {
  if (place.is_recomputed) {
    if (place.pass->is_recomputation) place.pass->order.leave(place.use);
    return;
  }
  place.pass->order.leave(place.use);
  if (!keeps_whole(unit, *place.pass)) unit.reshard();
  if (--depth_ == 0) end_pass();
}

void ShardedModel::end_pass() {
  const auto pass = std::exchange(pass_, nullptr);
  marker_ = {};  // which refers to the model
  for (const auto& unit : units_) {
    const bool is_on_its_way = !unit->is_whole() && !unit->is_free();
    if (unit->stays_whole) continue;
    if (is_on_its_way || !pass->has_graph) {
      unit->reshard();
    } else {
      unit->hide_whole();  // backward shows it again; until then a program finds the shards
    }
    unit->await_uploads();
  }
  if (!pass->has_graph) {
    trim_blocks();
    packed_.reset();
    gradient_memory_.reset();  // returns its pages
  }
  expected_.clear();
  for (const auto& use : pass->order.uses()) expected_.push_back(use.unit);
  if (!pass->has_graph) return;
  forget_graphs();
  graphs_.push_back(pass);
  ++passes_;
  compare_orders(*pass);
}

// Ranks with unequal numbers of batches differ in the kind of the pass after them. Otherwise one's
// gathers of evaluation could meet the other's of training.
void ShardedModel::compare_modes() {
  const bool trains = c10::GradMode::is_enabled();
  if (gather_group_->getSize() == 1 || std::exchange(trained_, trains) == trains) return;
  settle();
  const std::string kind = trains ? "training" : "evaluation";
  // Where this fails, others gather, for one more batch of the kind before.
  const auto doing = [&] { return "FullyShardedDataParallel was beginning " + kind; };
  with_context(doing, gather_group_, [&] {
    agree(
        kind, gather_group_,
        "beginning " + kind + " of a sharded model, which is collective: every rank runs it",
        describe_kinds);
  });
}

// Where this rank alone has a new order, others gather or reduce meanwhile, which is an error of
// both. Where it has another known one, the notes of the pass differ.
void ShardedModel::compare_orders(const ForwardPass& pass) {
  if (gather_group_->getSize() == 1) return;
  uint64_t mine = 0;
  for (const auto& use : pass.order.uses()) mine = mixed(mine, use.unit + 1);
  if (agreed_orders_.count(mine) > 0) return;
  const auto options = at::dtype(at::kLong).device(carrier_device(*gather_group_));
  auto hashes = at::empty({gather_group_->getSize()}, options);
  const auto doing = [] { return "FullyShardedDataParallel was comparing the units of forward"; };
  with_context(doing, gather_group_, [&] {
    all_gather_into_tensor(
        hashes, at::full({1}, static_cast<int64_t>(mine), options), gather_group_);
  });
  if (!hashes.eq(hashes[0]).all().item<bool>()) {
    std::vector<std::string> names;
    for (const auto& use : pass.order.uses()) names.push_back(unit(use.unit).name());
    agree(
        joined_by("\n", names), gather_group_, "comparing the units of forward",
        [&](const std::vector<std::string>& by_rank) { return describe_orders(by_rank, passes_); });
  }
  constexpr size_t kMostOrders = 1000;  // of models that leave units out at random
  if (agreed_orders_.size() == kMostOrders) agreed_orders_.clear();
  agreed_orders_.insert(mine);
}

bool ShardedModel::is_collective() const {
  return any_of(units_, [](const auto& unit) { return !unit->stays_whole; });
}

void ShardedModel::forward_failed(const ShardedUnit& unit) {
  if (!pass_) return;  // backward computes it again
  const bool is_innermost = !std::exchange(pass_->has_thrown, true);
  try {
    throw;
  } catch (c10::DistError&) {
    // A collective's says what all ranks did.
  } catch (c10::Error& error) {
    if (is_innermost) {
      error.add_context(ddp::str(
          "FullyShardedDataParallel ran forward of ", unit.name(), " ",
          on_rank_text(*gather_group_),
          ". Parameters of other units are this rank's shards there: use each in forward of its "
          "unit."));
    }
  } catch (...) {
  }
  if (depth_ == 1 && is_collective()) failed_passes_.note("forward", std::current_exception());
}

void ShardedModel::backward_failed(const std::exception_ptr& cause) noexcept {
  if (is_collective()) failed_passes_.note("backward", cause);
}

void ShardedModel::abandon(ShardedUnit& unit, const Place& place) noexcept {
  if (place.is_recomputed) return;
  const auto abandon_part = [](ShardedUnit& part) {
    if (!part.stays_whole) part.abandon();
  };
  abandon_part(unit);
  if (--depth_ > 0) return;
  for (const auto& use : place.pass->order.uses()) abandon_part(*units_[use.unit]);
  pass_.reset();
  marker_ = {};
}

void ShardedModel::broadcast_buffers() {
  const auto root = root_.lock();
  if (!root || !root->is_training()) return;
  std::vector<at::Tensor> buffers;
  for (const auto& buffer : root->buffers()) {
    if (buffer.defined() && buffer.numel() > 0) buffers.push_back(buffer);
  }
  for (const auto& group : {reduce_groups_.shard, reduce_groups_.replicate}) {
    if (!group) continue;
    TensorBroadcast broadcast(Arrival::InCopy);
    broadcast.start(buffers, /*source=*/0, *group);
    const auto doing = [] { return "FullyShardedDataParallel was broadcasting buffers"; };
    with_context(doing, group, [&] {
      broadcast.finish([](c10d::Work& work) { work.wait(); }, overwrite_unversioned);
    });
  }
}

GradientMemory* ShardedModel::gradient_memory() {
  if (!gradient_memory_ && gather_group_->getSize() > 1) {
    gradient_memory_ = gradient_memory_of(*reduce_groups_.shard, device());
  }
  return gradient_memory_.get();
}

at::Tensor ShardedModel::packed_memory(const UnitGradients& gradients) {
  if (reduce_groups_.shard->getSize() == 1) return {};
  const auto numel = gradients.packed_numel();
  const auto options = gradients.packed_options();
  const bool fits =
      packed_.defined() && packed_.numel() >= numel && packed_.dtype() == options.dtype();
  if (!fits) {
    packed_.reset();
    auto* memory = gradient_memory();
    const MemoryScope of_bucket(MemoryKind::Buckets);
    packed_ = memory ? memory->allocate(numel, options)
                     : reducible_memory(*reduce_groups_.shard, numel, options);
  }
  return packed_.narrow(0, 0, numel);
}

std::shared_ptr<void> ShardedModel::serve_gradients() {
  auto* memory = gradient_memory();
  if (!memory) return nullptr;
  std::set<size_t> sizes;
  for (const auto& unit : units_) {
    for (const auto bytes : unit->gradients().gradient_bytes()) {
      if (bytes >= memory->least_bytes()) sizes.insert(bytes);
    }
  }
  return memory->serve({sizes.begin(), sizes.end()});
}

BackwardTask& ShardedModel::task() {
  DDP_CHECK(
      !pass_,
      "FullyShardedDataParallel: expected no backward inside forward of the model, got one ",
      on_rank_text(*gather_group_), ". Call it after forward.");
  if (!task_) task_ = std::make_unique<BackwardTask>(*this);
  return *task_;
}

void ShardedModel::on_entry(const Place& place, ShardedUnit& unit) {
  auto& task = this->task();
  task.watch_end();
  if (place.is_recomputed) {
    unit.make_whole();
  } else {
    task.enter(place.pass, place.use);
  }
}

void ShardedModel::on_exit(const Place& place, ShardedUnit& unit) {
  auto& task = this->task();
  task.watch_end();
  place.is_recomputed ? task.on_repeated_exit(place, unit) : task.leave(place.pass, place.use);
}

void ShardedModel::before_gradient() { task().watch_end(); }

void ShardedModel::on_gradient(ShardedUnit& unit) { task().on_gradient(unit); }

void ShardedModel::end_backward(bool has_failed) {
  // A pass inside another one ends while a node of the other one runs.
  if (!task_ || (!has_failed && torch::autograd::get_current_node())) return;
  const auto task = std::exchange(task_, nullptr);
  if (has_failed) return task->fail();
  try {
    task->finish();
  } catch (...) {
    task->fail();
    throw;
  }
}

}  // namespace ddp
