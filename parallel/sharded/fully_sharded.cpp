#include <ddp/fully_sharded.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/serialize/archive.h>

#include "sharded/block_pool.h"
#include "sharded/passes/unit_nodes.h"
#include "sharded/sharded_model.h"
#include "sharded/sharded_parameters.h"

namespace ddp {
namespace {

FullyShardedOptions with_group(FullyShardedOptions options) {
  DDP_CHECK_VALUE(
      !options.mesh() || !options.process_group().given(),
      "FullyShardedDataParallel: expected process_group or mesh, got both. Leave one of them out.");
  if (const auto& mesh = options.mesh()) {
    DDP_CHECK_VALUE(
        mesh->names().size() <= 2, "FullyShardedDataParallel: expected a mesh of 1 or 2 axes, got ",
        mesh->names().size(), ". Pass some of its axes: mesh[{\"replicate\", \"shard\"}].");
    options.process_group(mesh->group(mesh->names().back()));
  } else {
    options.process_group(options.process_group().get());
  }
  return options;
}

void check_options(const FullyShardedOptions& options) {
  const auto where = on_rank_text(*options.process_group().get());
  DDP_CHECK_VALUE(
      options.prefetch() == 0 || options.prefetch() == 1,
      "FullyShardedDataParallel: expected prefetch 0 or 1, got ", options.prefetch(), " ", where,
      ".");
  for (const auto& [name, dtype] :
       {std::pair{"param_dtype", options.mp_policy().param_dtype()},
        std::pair{"reduce_dtype", options.mp_policy().reduce_dtype()},
        std::pair{"output_dtype", options.mp_policy().output_dtype()},
        std::pair{"buffer_dtype", options.mp_policy().buffer_dtype()}}) {
    DDP_CHECK_VALUE(
        !dtype || at::isFloatingType(*dtype), "FullyShardedDataParallel: expected a floating ",
        name, " in mp_policy, got ", *dtype, " ", where, ".");
  }
}

/// A root reduces the gradients of all its units.
void check_groups(
    const std::string& path, const UnitGradients::Groups& groups,
    const FullyShardedOptions& options) {
  const auto of_root = all_groups(options);
  const bool fits = have_same_ranks(groups.shard, of_root.front()) &&
                    have_same_ranks(groups.replicate, of_root.size() == 2 ? of_root[1] : nullptr);
  DDP_CHECK_VALUE(
      fits,
      "FullyShardedDataParallel: expected all units of a model to be cut over the same ranks, got "
      "others in ",
      path, " than in the module around it ", on_rank_text(*options.process_group().get()),
      ". Pass one process_group or mesh to all.");
}

void cast_buffers(torch::nn::Module& module, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  const c10::NoGradGuard no_grad;
  for (auto& buffer : module.buffers()) {
    if (buffer.defined() && buffer.is_floating_point()) buffer.set_data(buffer.to(*dtype));
  }
}

/// The archive's dtype where it has the tensor in another one.
std::optional<at::ScalarType> other_dtype(
    torch::serialize::InputArchive& archive, const std::string& name, const at::Tensor& tensor,
    bool is_buffer) {
  at::Tensor saved;
  if (!tensor.defined() || !archive.try_read(name, saved, is_buffer)) return std::nullopt;
  if (saved.scalar_type() == tensor.scalar_type()) return std::nullopt;
  return saved.scalar_type();
}

/// Has a module's parameters and buffers in the dtypes of an archive, for Module::load(): that
/// gives a tensor the archive's memory and leaves it its dtype, so that the bytes of other dtypes
/// would be taken for values of this one.
class ArchiveDtypes {
 public:
  /// Tensors of other dtypes have no elements until they are loaded.
  ArchiveDtypes(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
    take(module, archive);
  }
  /// The tensors are as they were, unless finish() was called.
  ~ArchiveDtypes() {
    for (auto& [tensor, before] : before_) tensor.set_data(before);
  }
  C10_DISABLE_COPY_AND_ASSIGN(ArchiveDtypes);

  /// Converts the loaded tensors to their own dtypes.
  void finish() {
    for (auto& [tensor, before] : before_) {
      if (tensor.scalar_type() == before.scalar_type()) continue;  // written back meanwhile
      tensor.set_data(tensor.to(before.scalar_type()));
    }
    before_.clear();
  }

 private:
  void take(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
    const auto take_all = [&](const torch::OrderedDict<std::string, at::Tensor>& tensors,
                              bool are_buffers) {
      for (const auto& item : tensors) {
        auto tensor = item.value();
        const auto dtype = other_dtype(archive, item.key(), tensor, are_buffers);
        if (!dtype) continue;
        before_.emplace_back(tensor, tensor.detach());
        tensor.set_data(at::empty({0}, tensor.options().dtype(*dtype)));
      }
    };
    take_all(module.named_parameters(/*recurse=*/false), /*are_buffers=*/false);
    take_all(module.named_buffers(/*recurse=*/false), /*are_buffers=*/true);
    for (const auto& child : module.named_children()) {
      torch::serialize::InputArchive of_child;
      if (archive.try_read(child.key(), of_child)) take(*child.value(), of_child);
    }
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // those of other dtypes
};

}  // namespace

FullyShardedBase::FullyShardedBase(
    std::shared_ptr<torch::nn::Module> module, const FullyShardedOptions& user_options)
    : torch::nn::Module("FullyShardedDataParallel"),
      module_(std::move(module)),
      policy_(user_options.mp_policy()) {
  // Under a DeferredInit guard: the unit gets its memory here, and only its shard stays.
  const c10::impl::ExcludeDispatchKeyGuard no_recording(c10::DispatchKey::DeferredInit);
  const auto options = with_group(user_options);
  const auto group = options.process_group().get();
  SharedParameters found;
  std::string problem;
  try {
    DDP_CHECK_VALUE(
        module_ != nullptr, "FullyShardedDataParallel: expected a module, got an empty one ",
        on_rank_text(*group), ".");
    check_options(options);
    found = find_parameters(*module_, options);
    for (const auto& [path, unit] : found.units) check_groups(path, unit->unit_->groups(), options);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  }
  for (const auto& of_ranks : all_groups(options)) {
    agree_on_parameters(found.own, problem, of_ranks, policy_);
  }
  materialize_own(*module_, found);
  if (options.init_sync()) broadcast_parameters(*module_, found, options);
  unit_ = std::make_shared<ShardedUnit>(found.own, options);
  unit_->add_hooks();
  model_ = std::make_shared<ShardedModel>(*unit_, options.prefetch());
  model_->add(unit_);
  model_->set_root(module_);
  for (const auto& [path, unit] : found.units) {
    if (unit->unit_->model() != model_) model_->adopt(*unit->unit_->model(), path);
  }
  cast_buffers(*module_, policy_.buffer_dtype());
  register_parts_of(*module_, *this);  // and not the module, so that names are its own
}

FullyShardedBase::~FullyShardedBase() = default;

NoSyncGuard FullyShardedBase::no_sync() { return NoSyncGuard(gradient_sync_); }

void FullyShardedBase::sync_outputs(const std::vector<at::Tensor>& outputs) {
  const auto passes = passes_of(outputs, *unit_->model());
  DDP_CHECK_VALUE(
      !passes.empty(),
      "sync_in_backward: expected outputs of this model's forward, or what is computed from them, "
      "got none ",
      on_rank_text(*unit_->groups().shard), ".");
  for (const auto& pass : passes) pass->reduces = true;
  unit_->model()->expect_reduction();
}

void FullyShardedBase::hold_units() { unit_->model()->hold(); }

void FullyShardedBase::drop_units() noexcept { unit_->model()->drop(); }

void FullyShardedBase::unshard() {
  if (!unit_->stays_whole) unit_->reshard();  // what a pass left may be old
  unit_->make_whole();
  unit_->stays_whole = true;
}

void FullyShardedBase::reshard() {
  unit_->stays_whole = false;
  unit_->part_with_whole();
}

void FullyShardedBase::set_reshard_after_forward(bool reshard_after_forward) {
  unit_->reshard_after_forward = reshard_after_forward;
}

std::string summary(const FullyShardedStats& stats) {
  if (stats.units.empty()) return "";
  UnitStats all;
  for (const auto& unit : stats.units) {
    all.gathers += unit.gathers;
    all.reductions += unit.reductions;
    all.bytes += unit.bytes;
  }
  return ddp::str(
      stats.units.size(), " units, ", all.gathers, " gathers, ", all.reductions, " reductions, ",
      mib_text(all.bytes));
}

FullyShardedStats FullyShardedBase::stats() const {
  FullyShardedStats stats;
  const auto& own = unit_->stats.name;
  stats.units.push_back(unit_->stats);
  for (const auto& unit : unit_->model()->units()) {
    const auto& name = unit->stats.name;
    const bool is_inside = own.empty() || name.rfind(own + ".", 0) == 0;
    if (unit != unit_ && is_inside) stats.units.push_back(unit->stats);
  }
  return stats;
}

std::vector<ParameterLayout> FullyShardedBase::layouts() { return unit_->layouts(); }

std::string FullyShardedBase::clipping_error() const {
  if (!unit_->gradients().has_kept()) return "";
  return ddp::str(
      "expected gradients to be final, got ", unit_->name(),
      " with whole gradients from no_sync() ", on_rank_text(*unit_->groups().shard),
      ". Run a backward outside no_sync() before.");
}

void FullyShardedBase::check_whole(const char* call) const {
  const auto is_sharded = [](const std::shared_ptr<ShardedUnit>& unit) {
    return !unit->is_whole() && unit->gradients().size() > 0;
  };
  DDP_CHECK(
      none_of(unit_->model()->units(), is_sharded), "FullyShardedDataParallel: ", call,
      "() has this rank's shards alone ", on_rank_text(*unit_->groups().shard),
      ". Call ddp::full_state_dict(model) on every rank, or add it to a Checkpointer.");
}

void FullyShardedBase::save(torch::serialize::OutputArchive& archive) const {
  check_whole("save");
  torch::nn::Module::save(archive);
}

void FullyShardedBase::load(torch::serialize::InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  std::optional<SummonFullParams> whole;
  // Else inside of SummonFullParams, or a unit of a model that loads.
  if (!unit_->stays_whole) whole.emplace(*this, /*write_back=*/false);
  ArchiveDtypes dtypes(*this, archive);
  torch::nn::Module::load(archive);
  if (whole) whole->write_back();
  dtypes.finish();
}

std::shared_ptr<torch::nn::Module> FullyShardedBase::clone(
    const std::optional<c10::Device>&) const {
  DDP_CHECK(
      false, "FullyShardedDataParallel: clone() has this rank's shards alone ",
      on_rank_text(*unit_->groups().shard),
      ". Make another module, and call ddp::load_full_state_dict().");
}

void FullyShardedBase::to(torch::Device device, torch::Dtype, bool non_blocking) {
  to(device, non_blocking);
}
void FullyShardedBase::to(at::Device, bool non_blocking) { to(at::kFloat, non_blocking); }
void FullyShardedBase::to(torch::Dtype, bool) {
  DDP_CHECK(
      false,
      "FullyShardedDataParallel: to() would move this rank's shards, and not the memory that they "
      "are gathered into, ",
      on_rank_text(*unit_->groups().shard),
      ". Move each module, in device and dtype, before it becomes a unit: in the constructor of a "
      "model that has units.");
}

void FullyShardedBase::train(bool on) {
  torch::nn::Module::train(on);
  module_->train(on);
}

SummonFullParams::SummonFullParams(FullyShardedBase& model, bool write_back)
    : write_back_(write_back) {
  const auto& whole_model = *model.unit_->model();
  DDP_CHECK(
      whole_model.is_idle(),
      "SummonFullParams: expected no forward or backward of the model, got one that runs ",
      on_rank_text(*model.unit_->groups().shard), ".");
  const auto& own = model.unit_->stats.name;
  for (const auto& unit : whole_model.units()) {
    const auto& name = unit->stats.name;
    if (unit == model.unit_ || own.empty() || name.rfind(own + ".", 0) == 0) units_.push_back(unit);
  }
  try {
    for (const auto& unit : units_) {
      if (!unit->stays_whole) unit->reshard();  // what a pass left may be old
      unit->make_whole_exactly();
      stayed_whole_.push_back(std::exchange(unit->stays_whole, true));
    }
  } catch (...) {
    restore();
    throw;
  }
}

void SummonFullParams::write_back() const {
  for (const auto& unit : units_) unit->write_back();
}

void SummonFullParams::restore() noexcept {
  for (size_t i = 0; i < stayed_whole_.size(); ++i) {
    units_[i]->stays_whole = stayed_whole_[i];
    if (!units_[i]->stays_whole) units_[i]->part_with_whole();
  }
  trim_blocks();
}

SummonFullParams::~SummonFullParams() {
  try {
    if (write_back_) write_back();
  } catch (const std::exception& error) {
    TORCH_WARN("SummonFullParams: the parameters were not written back: ", error.what());
  }
  restore();
}

}  // namespace ddp
