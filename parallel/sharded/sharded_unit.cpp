#include "sharded/sharded_unit.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <ddp/internal/accumulating_edges.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "sharded/error_context.h"
#include "sharded/own_group.h"
#include "sharded/sharded_model.h"

namespace ddp {

using torch::autograd::variable_list;

namespace {

bool is_kept_float(const std::string& name, const MixedPrecisionPolicy& policy) {
  const auto dotted = "." + name + ".";
  return any_of(policy.keep_float(), [&](const std::string& part) {
    return dotted.find("." + part + ".") != std::string::npos;
  });
}

/// A parameter of one dimension is small, and may have another magnitude than its neighbours.
bool has_quantized_gather(const ParameterLayout& layout, const MixedPrecisionPolicy& policy) {
  const auto& p = layout.local;
  return policy.gather_int8() && p.is_floating_point() && p.dim() > 1 && p.numel() > 0 &&
         !is_kept_float(layout.name, policy);
}

at::ScalarType gathered_dtype(
    const std::string& name, at::ScalarType own, const MixedPrecisionPolicy& policy) {
  const bool is_cast = policy.param_dtype() && at::isFloatingType(own);
  return is_cast && !is_kept_float(name, policy) ? *policy.param_dtype() : own;
}

/// The boxes of elements [begin, end) of the elements of some boxes, one box after another.
std::vector<TensorBox> boxes_within(
    const std::vector<TensorBox>& boxes, int64_t begin, int64_t end) {
  std::vector<TensorBox> parts;
  for (const auto& box : boxes) {
    const auto numel = c10::multiply_integers(box.size);
    const auto first = std::clamp<int64_t>(begin, 0, numel);
    const auto last = std::clamp<int64_t>(end, 0, numel);
    if (numel == 0) {
      parts.push_back(box);  // on all ranks, so that the parameter has a place
    } else if (first < last) {
      for (auto& part : boxes_of(box, first, last)) parts.push_back(std::move(part));
    }
    begin -= numel;
    end -= numel;
  }
  return parts;
}

}  // namespace

/// On a parameter's gradient accumulator, which may outlive the unit.
class ShardedUnit::BeforeGradient : public torch::autograd::FunctionPreHook {
 public:
  BeforeGradient(std::weak_ptr<ShardedUnit> unit, size_t i) : unit_(std::move(unit)), i_(i) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto unit = unit_.lock()) {
      unit->check_takes_gradients();
      unit->check_is_untouched(i_);
      unit->model()->before_gradient();
      unit->gradients_->before_accumulate(i_);
    }
    return gradients;
  }

 private:
  std::weak_ptr<ShardedUnit> unit_;
  size_t i_;
};

class ShardedUnit::AfterGradient : public torch::autograd::FunctionPostHook {
 public:
  AfterGradient(std::weak_ptr<ShardedUnit> unit, size_t i) : unit_(std::move(unit)), i_(i) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto unit = unit_.lock()) {
      unit->check_is_dense(i_);
      unit->gradients_->after_accumulate(i_);
      unit->model()->on_gradient(*unit);
    }
    return outputs;
  }

 private:
  std::weak_ptr<ShardedUnit> unit_;
  size_t i_;
};

/// Takes the gradient of a parameter as a shard: a value that was computed from it is that of this
/// rank's elements alone.
class ShardedUnit::ShardNode : public ShardNodeBase {
 public:
  ShardNode(std::weak_ptr<ShardedUnit> unit, size_t i) : unit_(std::move(unit)), i_(i) {}
  std::string name() const override { return "ddp::ShardOfParameter"; }
  NodePtr accumulator() const override {
    const auto unit = unit_.lock();
    return unit ? unit->hooked_[i_] : NodePtr();
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    const auto unit = unit_.lock();
    if (unit && gradients[0].defined()) unit->refuse_gradient_of_shard(i_);
    return {};
  }

 private:
  std::weak_ptr<ShardedUnit> unit_;
  size_t i_;
};

ShardedUnit::ShardedUnit(
    const std::vector<ParameterLayout>& layouts, const FullyShardedOptions& options)
    : reshard_after_forward(options.reshard_after_forward()), whole_layouts_(layouts) {
  groups_.shard = options.process_group().get();
  if (options.mesh()) {
    const auto names = options.mesh()->names();
    groups_.shard = options.mesh()->group(names.back());
    if (names.size() == 2) groups_.replicate = options.mesh()->group(names.front());
  }
  note_cut(layouts, CutBy::Unit);
  const auto own = own_group_of(groups_.shard, OwnOrder::Gathers, groups_.replicate);
  gather_group_ = own.group;
  number_ = own.number;
  group_into_segments(options);
}

ShardedUnit::~ShardedUnit() = default;

void ShardedUnit::group_into_segments(const FullyShardedOptions& options) {
  using Kind = std::tuple<at::ScalarType, at::ScalarType, bool, bool>;
  const auto& policy = options.mp_policy();
  std::vector<Kind> kinds;
  std::vector<std::vector<size_t>> members;
  for (size_t i = 0; i < whole_layouts_.size(); ++i) {
    const auto& layout = whole_layouts_[i];
    const auto dtype = layout.local.scalar_type();
    const Kind kind(
        dtype, gathered_dtype(layout.name, dtype, policy), layout.local.requires_grad(),
        has_quantized_gather(layout, policy));
    const auto at =
        static_cast<size_t>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
    if (at == kinds.size()) {
      kinds.push_back(kind);
      members.emplace_back();
    }
    members[at].push_back(i);
  }
  places_.resize(whole_layouts_.size());
  size_t place = 0;
  std::optional<at::ScalarType> reduce_dtype = policy.reduce_dtype();
  for (size_t s = 0; s < kinds.size(); ++s) {
    std::vector<at::Tensor> parameters;
    for (const auto i : members[s]) {
      parameters.push_back(whole_layouts_[i].local);
      places_[i] = place++;
    }
    const auto [own, gathered, trainable, is_quantized] = kinds[s];
    segments_.emplace_back(
        gather_group_, std::move(parameters),
        FlatSegment::Form{gathered, is_quantized, options.cpu_offload()});
    if (!policy.reduce_dtype()) {
      reduce_dtype = reduce_dtype ? at::promote_types(*reduce_dtype, own) : own;
    }
  }
  const auto is_on_cpu = [](const FlatSegment& segment) { return segment.device().is_cpu(); };
  if (options.cpu_offload() && any_of(segments_, is_on_cpu)) {
    TORCH_WARN_ONCE(
        "FullyShardedDataParallel: cpu_offload(true) changes nothing for parameters on CPUs, which "
        "are in the host's memory. Leave it out, or move the module to its device before it is "
        "wrapped.");
  }
  gradients_ = std::make_unique<UnitGradients>(segments_, reduce_dtype.value_or(at::kFloat));
  hooked_.resize(gradients_->size());
}

void ShardedUnit::add_hooks() {
  size_t i = 0;
  for (auto& segment : segments_) {
    for (size_t slot = 0; slot < segment.parameters().size(); ++slot, ++i) {
      const auto& accumulator = segment.accumulator(slot);
      if (hooked_[i] || !accumulator) continue;
      segment.set_shard_node(slot, make_node<ShardNode>(weak_from_this(), i));
      hooked_[i] = accumulator;
      accumulator->add_pre_hook(std::make_unique<BeforeGradient>(weak_from_this(), i));
      accumulator->add_post_hook(std::make_unique<AfterGradient>(weak_from_this(), i));
    }
  }
}

void ShardedUnit::check_takes_gradients() const {
  DDP_CHECK(
      has_whole_sizes_, "FullyShardedDataParallel: expected gradients of ", name(),
      " while its parameters are whole, got one of a value that was computed from them inside of "
      "SummonFullParams, or between unshard() and reshard(), ",
      on_rank_text(*groups_.shard), ". Run its backward before they end.");
}

void ShardedUnit::refuse_gradient_of_shard(size_t i) const {
  DDP_CHECK(
      false,
      "FullyShardedDataParallel: expected parameters to be used in forward of their unit, got a "
      "gradient of a value that was computed from this rank's shard of ",
      text_of_parameter(i), ", ", on_rank_text(*groups_.shard),
      ". Compute a penalty in forward of the unit, or it and its backward inside of "
      "SummonFullParams, or add its gradient to .grad after backward.");
}

void ShardedUnit::refuse_shards_in(const Nodes& nodes) const {
  size_t i = 0;
  for (const auto& segment : segments_) {
    for (size_t slot = 0; slot < segment.parameters().size(); ++slot, ++i) {
      const bool is_in = segment.is_shard_used(slot) && nodes.count(segment.shard_node(slot).get());
      if (is_in) refuse_gradient_of_shard(i);
    }
  }
}

std::vector<bool> ShardedUnit::used_shards() const {
  std::vector<bool> used;
  for (const auto& segment : segments_) {
    for (size_t slot = 0; slot < segment.parameters().size(); ++slot) {
      used.push_back(segment.is_shard_used(slot));
    }
  }
  return used;
}

std::string ShardedUnit::text_of_parameter(size_t i) const {
  const auto at = std::find(places_.begin(), places_.end(), i) - places_.begin();
  return whole_layouts_[static_cast<size_t>(at)].name + " in " + name();
}

void ShardedUnit::check_is_untouched(size_t i) const {
  DDP_CHECK(
      !gradients_->is_changed(i),
      "FullyShardedDataParallel: expected .grad as a pass of no_sync() left it, or zeros, got that "
      "of ",
      text_of_parameter(i), " changed in place ", on_rank_text(*groups_.shard),
      ". Change it after a backward outside no_sync(), which adds what these passes kept.");
}

void ShardedUnit::check_is_dense(size_t i) const {
  const auto& gradient = gradients_->parameter(i).grad();
  DDP_CHECK_VALUE(
      !gradient.defined() || gradient.layout() == at::kStrided,
      "FullyShardedDataParallel: expected dense gradients, got a ", gradient.layout(), " one of ",
      text_of_parameter(i), " ", on_rank_text(*groups_.shard), ". Name it in ignored_parameters.");
}

std::vector<ParameterLayout> ShardedUnit::layouts() const {
  std::vector<FlatSegment::Range> ranges;
  for (const auto& segment : segments_) {
    for (size_t slot = 0; slot < segment.parameters().size(); ++slot) {
      ranges.push_back(segment.range_of(slot));
    }
  }
  auto layouts = whole_layouts_;
  for (size_t i = 0; i < layouts.size(); ++i) {
    auto& layout = layouts[i];
    const auto& range = ranges[places_[i]];
    if (!has_whole_sizes_) {
      layout.boxes = boxes_within(layout.boxes, range.from, range.from + range.numel);
      layout.sharded_over.push_back(groups_.shard);
    } else {
      layout.replicated_over.push_back(groups_.shard);
    }
    if (groups_.replicate) layout.replicated_over.push_back(groups_.replicate);
  }
  return layouts;
}

c10::Device ShardedUnit::device() const {
  return has_parameters() ? segments_[0].device() : model()->device();
}

void ShardedUnit::begin_gather(bool exactly) {
  if (memory_ != Memory::Free) return;
  with_context(
      [&] { return gathering_text(); }, groups_.shard,
      [&] {
        check_rests_in_place();
        for (auto& segment : segments_) segment.begin_gather(exactly);
      });
  for (const auto& segment : segments_) stats.bytes += segment.gather_bytes();
  memory_ = Memory::Filling;
  ++stats.gathers;
}

void ShardedUnit::check_rests_in_place() const {
  size_t i = 0;
  for (const auto& segment : segments_) {
    for (size_t slot = 0; slot < segment.parameters().size(); ++slot, ++i) {
      DDP_CHECK(
          !segment.rests_on_host() || segment.is_in_place(slot),
          "FullyShardedDataParallel: expected parameters in host memory between steps, where "
          "cpu_offload keeps them, got ",
          text_of_parameter(i), " on ", segment.parameters()[slot].device(), " ",
          on_rank_text(*groups_.shard),
          ". Move the module to its device before it is wrapped, and not after.");
    }
  }
}

void ShardedUnit::check_may_capture() const {
  const bool rests_on_host =
      any_of(segments_, [](const FlatSegment& segment) { return segment.rests_on_host(); });
  DDP_CHECK(
      !rests_on_host || !is_capturing(device()),
      "FullyShardedDataParallel: expected a step that runs, because the optimizer of a unit with "
      "cpu_offload steps on the host, got one that is captured, of ",
      name(), " ", on_rank_text(*groups_.shard), ". Leave out cpu_offload, or the CapturedStep.");
}

void ShardedUnit::await_uploads() {
  for (auto& segment : segments_) segment.await_upload();
}

void ShardedUnit::make_whole() {
  begin_gather();
  if (memory_ == Memory::Filling) {
    end_gather();
    memory_ = Memory::Full;
  }
  if (std::exchange(has_whole_sizes_, true)) return;
  for (auto& segment : segments_) segment.point_at_whole();
}

void ShardedUnit::make_whole_exactly() {
  const bool is_rounded =
      any_of(segments_, [](const FlatSegment& segment) { return segment.is_rounded(); });
  if (is_rounded) release();
  begin_gather(/*exactly=*/true);
  make_whole();
}

std::string ShardedUnit::gathering_text() const {
  return "FullyShardedDataParallel was gathering " + name();
}

void ShardedUnit::end_gather() {
  with_context(
      [&] { return gathering_text(); }, groups_.shard,
      [&] {
        for (auto& segment : segments_) segment.end_gather();
      });
}

void ShardedUnit::keep_writes() {
  if (!has_whole_sizes_ || memory_ != Memory::Full) return;
  for (auto& segment : segments_) {
    if (!segment.is_written()) continue;
    if (!stays_whole) gradients_->note_writes(segment.hash_of_whole());
    segment.write_back();
  }
}

void ShardedUnit::release() {
  if (memory_ == Memory::Free) return;
  keep_writes();
  end_gather();
  for (auto& segment : segments_) segment.release();
  memory_ = Memory::Free;
}

void ShardedUnit::reshard() {
  release();
  hide_whole();
}

void ShardedUnit::hide_whole() {
  keep_writes();
  point_at_shards();
}

void ShardedUnit::point_at_shards() {
  if (!std::exchange(has_whole_sizes_, false)) return;
  for (auto& segment : segments_) segment.point_at_shard();
}

void ShardedUnit::part_with_whole() {
  point_at_shards();
  if (memory_ == Memory::Free) return;
  end_gather();
  await_uploads();
  for (auto& segment : segments_) segment.part_with_whole();
  memory_ = Memory::Free;
}

void ShardedUnit::abandon() noexcept {
  const bool is_full = memory_ == Memory::Full;
  point_at_shards();
  if (is_full) release();
}

std::shared_ptr<ShardedModel> ShardedUnit::model() const {
  auto model = model_.lock();
  DDP_CHECK(
      model, "FullyShardedDataParallel: expected the root of ", name(), ", which is gone, ",
      on_rank_text(*groups_.shard), ". Keep it as long as its units.");
  return model;
}

bool ShardedUnit::takes_gradients(const Wanted& wanted) const {
  return any_of(hooked_, [&](const NodePtr& accumulator) {
    const auto at = wanted.find(accumulator.get());
    return accumulator && at != wanted.end() && at->second.needed_;
  });
}

void ShardedUnit::write_back() {
  for (auto& segment : segments_) segment.write_back();
}

bool ShardedUnit::has_memory_of(const at::Tensor& tensor) const {
  return any_of(
      segments_, [&](const FlatSegment& segment) { return segment.has_memory_of(tensor); });
}

}  // namespace ddp
