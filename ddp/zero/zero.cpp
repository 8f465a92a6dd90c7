#include <ddp/zero.h>

#include <string>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/zero_shards.h>

#include "clip/gradient_norm.h"
#include "wrapper/state.h"
#include "zero/checks.h"
#include "zero/sharded_optimizer.h"

namespace ddp {
namespace {

using State = DistributedDataParallelBase::State;

}  // namespace

class ZeroRedundancyOptimizerBase::Impl {
 public:
  Impl(
      ZeroRedundancyOptimizerBase& owner, std::shared_ptr<DistributedDataParallelBase> model,
      detail::ZeroKind kind, const ZeroOptions& options)
      : owner_(owner),
        model_(std::move(model)),
        kind_(std::move(kind)),
        options_(checked(options, kind_, state())),
        group_count_(owner.param_groups().size()),
        generation_(state().generation()) {
    check_parameters(owner.param_groups(), kind_, state());
    if (options_.stage() == 2) shards_ = state().shard_gradients();
    const auto group = options_.process_group().given();
    optimizer_ = cut_over(group ? group : state().group(), shards_.get());
    warn_of_offload();
    state().count_sharded_optimizer(true);
  }
  ~Impl() { state().count_sharded_optimizer(false); }

  void rebind(const ProcessGroup& group) {
    DDP_CHECK(
        !options_.overlap(),
        "ZeroRedundancyOptimizer: expected no overlap in rebind(), got overlap on ",
        state().monitor().rank_text(), ". Make a new optimizer.");
    DDP_CHECK(
        (options_.stage() == 1 && options_.process_group().given()) || group == state().group(),
        "ZeroRedundancyOptimizer: expected the model's group in rebind(), got another one on ",
        state().monitor().rank_text(), ". Call the model's rebind() before.");
    auto shards = shards_ ? shards_of_model() : nullptr;
    auto optimizer = cut_over(group, shards.get());
    // Nothing throws from here on.
    if (options_.process_group().given()) options_.process_group(group);
    optimizer_ = std::move(optimizer);
    shards_ = std::move(shards);
    next_shards_.reset();
    release_gradients();
    generation_ = state().generation();
  }

  void step_in_backward(const std::shared_ptr<Impl>& self) {
    auto& chunks = optimizer_->chunks();
    for (size_t c = 0; c < chunks.size(); ++c) {
      const auto& parameters = chunks[c].flat.parameters();
      for (size_t slot = 0; slot < parameters.size(); ++slot) {
        slots_[parameters[slot].unsafeGetTensorImpl()] = {c, slot};
      }
    }
    begin_pass();
    const auto weak = std::weak_ptr<Impl>(self);
    state().on_bucket_reduced(
        [weak](const auto& part, bool last) {
          if (const auto impl = weak.lock()) impl->on_reduced(part, last);
        },
        [weak] {
          if (const auto impl = weak.lock()) impl->check();
        });
  }

  void step() {
    check();
    state().monitor().abort_on_error(
        [] { return std::string("stepping a ZeroRedundancyOptimizer"); },
        [&] {
          check_gradients_were_averaged();
          const at::NoGradGuard no_grad;
          optimizer_->set_options(owner_.param_groups());
          optimizer_->step();
          release_gradients();
          gather_all();
        });
  }

  /// Call it when the gradients reduced so far were stepped, or are to be discarded.
  void release_gradients() {
    if (shards_) release(*shards_);
  }

  const ZeroOptions& options() const { return options_; }
  const detail::ZeroKind& kind() const { return kind_; }
  ShardedOptimizer& optimizer() const { return *optimizer_; }
  State& state() const { return *model_->state_; }

  void check() const {
    DDP_CHECK(
        state().generation() == generation_,
        "ZeroRedundancyOptimizer: expected the model as it was when this was made, got one after "
        "refresh() or rebind() on ",
        state().monitor().rank_text(),
        ". Make a new optimizer after refresh(), and call its rebind() after the model's.");
    DDP_CHECK(
        owner_.param_groups().size() == group_count_, "ZeroRedundancyOptimizer: expected the ",
        group_count_, " groups of parameters that it was made with, got ",
        owner_.param_groups().size(), " on ", state().monitor().rank_text(),
        ". Make a new optimizer with all of them.");
    DDP_CHECK(
        !is_offloaded(options_) || !is_capturing(state().device()),
        "ZeroRedundancyOptimizer: expected no capture of a step with offload, in which the host "
        "steps, got one on ",
        state().monitor().rank_text(), ". Step outside of the captured function.");
  }

 private:
  struct ChunkSlot {
    size_t chunk;
    size_t slot;
  };

  /// The gradient shards of the model's reducer, a new one after the model's rebind(). It is asked
  /// once: where rebind() then fails, the next call takes the same.
  std::shared_ptr<GradientShards> shards_of_model() {
    if (generation_ == state().generation()) return shards_;
    if (next_generation_ != state().generation()) {
      next_shards_ = state().shard_gradients();
      next_generation_ = state().generation();
    }
    return next_shards_;
  }

  std::unique_ptr<ShardedOptimizer> cut_over(ProcessGroup group, GradientShards* shards) const {
    // With stage 2 one chunk per bucket, in the order in which the averages are ready.
    const auto& reducer = state().reducer();
    const auto& groups = owner_.param_groups();
    const bool waits_on_stream = capabilities_of(*group, state().device()).waits_on_stream;
    auto parameters = shards != nullptr
                          ? chunks_of_buckets(reducer.bucket_indices(), reducer.parameters())
                          : chunks_of_groups(
                                groups, reducer.parameters(), waits_on_stream,
                                kind_.needs_whole_tensors ? group->getSize() : 1);
    std::unique_ptr<ShardedOptimizer> optimizer;
    const auto make = [&] {
      optimizer = std::make_unique<ShardedOptimizer>(
          std::move(group), std::move(parameters), groups, owner_.defaults(), kind_, options_);
    };
    if (options_.offload_file()) {
      // One rank's disk may be full: the others learn of it in their next collective.
      state().monitor().abort_on_error(
          [] { return std::string("making the file of a ZeroRedundancyOptimizer"); }, make);
    } else {
      make();
    }
    auto& chunks = optimizer->chunks();
    for (size_t c = 0; shards != nullptr && c < chunks.size(); ++c) chunks[c].shard = &(*shards)[c];
    return optimizer;
  }

  void warn_of_offload() const {
    if (!options_.offload() || options_.offload_file()) return;
    for (const auto& chunk : optimizer_->chunks()) {
      if (!chunk.flat.whole().is_cpu()) return;
    }
    TORCH_WARN_ONCE(
        "ZeroRedundancyOptimizer: offload(true) changes nothing for parameters on CPUs, whose "
        "state is in the host's memory. Leave it out, or set offload_file(path) for a state that "
        "does not fit there.");
  }

  // Gradients of passes under no_sync() alone are whole and in no shard, so a step would ignore
  // them.
  void check_gradients_were_averaged() const {
    if (!shards_ || group_size() == 1) return;
    for (const auto& shard : *shards_) {
      if (contains(shard.arrived, 1)) return;
    }
    for (const auto& group : owner_.param_groups()) {
      for (const auto& p : group.params()) {
        DDP_CHECK(
            !p.grad().defined(),
            "ZeroRedundancyOptimizer: expected an averaged backward pass before a step of stage 2, "
            "got gradients of passes under no_sync() alone on ",
            state().monitor().rank_text(), ". End no_sync() before the last pass of each step.");
      }
    }
  }

  int group_size() const { return optimizer_->group()->getSize(); }

  // One chunk after the other: the backend may need a copy of what it gathers.
  void gather_all() {
    for (auto& chunk : optimizer_->chunks()) {
      chunk.flat.gather_async()->wait();
      ShardedOptimizer::mark_changed(chunk);
    }
  }

  void begin_pass() {
    for (auto& chunk : optimizer_->chunks()) {
      chunk.missing = chunk.flat.parameters().size();
      chunk.reported.assign(chunk.missing, 0);
    }
  }

  // Called with each part of a backward pass, in the same order on every rank.
  void on_reduced(const std::vector<at::Tensor>& part, bool last) {
    const at::NoGradGuard no_grad;
    check();
    for (const auto& p : part) {
      const auto found = slots_.find(p.unsafeGetTensorImpl());
      if (found == slots_.end()) continue;
      auto& chunk = optimizer_->chunks()[found->second.chunk];
      chunk.reported[found->second.slot] = 1;
      if (--chunk.missing == 0) step_and_send(chunk);
    }
    if (!last) return;
    // A rank without input gets no part with the parameters that no rank used.
    for (auto& chunk : optimizer_->chunks()) {
      if (chunk.missing > 0) step_and_send(chunk);
    }
    for (auto& [chunk, work] : pending_gathers_) {
      work->wait();
      ShardedOptimizer::mark_changed(*chunk);
    }
    pending_gathers_.clear();
    begin_pass();
    release_gradients();
  }

  void step_and_send(ShardChunk& chunk) {
    optimizer_->set_options(owner_.param_groups());
    optimizer_->step(chunk);
    pending_gathers_.emplace_back(&chunk, chunk.flat.gather_async());
  }

  ZeroRedundancyOptimizerBase& owner_;
  const std::shared_ptr<DistributedDataParallelBase> model_;
  const detail::ZeroKind kind_;
  ZeroOptions options_;
  const size_t group_count_;
  int64_t generation_;
  std::shared_ptr<GradientShards> shards_;       // with stage 2
  std::shared_ptr<GradientShards> next_shards_;  // after a rebind() that failed
  int64_t next_generation_ = -1;                 // of the model, to whose reducer they belong
  std::unique_ptr<ShardedOptimizer> optimizer_;
  // The members below are used with overlap.
  std::unordered_map<const void*, ChunkSlot> slots_;
  std::vector<std::pair<ShardChunk*, c10::intrusive_ptr<c10d::Work>>> pending_gathers_;
};

/// Steps on a rank without input, with the gradients that the model's hook received.
class ZeroRedundancyOptimizerBase::ZeroJoinHook : public JoinHook {
 public:
  explicit ZeroJoinHook(Impl& impl) : impl_(impl) {}

  void main_hook() override { impl_.step(); }

 private:
  Impl& impl_;
};

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(
    std::shared_ptr<DistributedDataParallelBase> model,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::unique_ptr<torch::optim::OptimizerOptions> defaults, detail::ZeroKind kind,
    const ZeroOptions& options)
    : Optimizer(groups, std::move(defaults)),
      impl_(std::make_shared<Impl>(*this, std::move(model), std::move(kind), options)) {
  if (options.overlap()) impl_->step_in_backward(impl_);
}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() = default;

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode with_grad(true);
    loss = closure();
  }
  const OptimizerTime::Scope time;
  const auto& state = impl_->state();
  DDP_CHECK(
      options().overlap() || !state.is_in_join() || join_context(),
      "ZeroRedundancyOptimizer: expected to be part of the join() that its model is in, got a step "
      "without, for which ranks without input would not come, on ",
      state.monitor().rank_text(), ". Call ddp::join({model.get(), &optimizer}, body).");
  if (options().overlap()) {
    impl_->check();
  } else {
    notify_join(*this);
    impl_->step();
  }
  return loss;
}

void ZeroRedundancyOptimizerBase::rebind(const GroupArg& group) { impl_->rebind(group.get()); }

void ZeroRedundancyOptimizerBase::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  impl_->release_gradients();
}

void ZeroRedundancyOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  consolidated()->save(archive);
}

void ZeroRedundancyOptimizerBase::load(torch::serialize::InputArchive& archive) {
  const auto whole = unsharded();
  whole->load(archive);
  load_whole(*whole);
}

size_t ZeroRedundancyOptimizerBase::local_state_bytes() const {
  return impl_->optimizer().state_bytes();
}

double ZeroRedundancyOptimizerBase::balance() const { return impl_->optimizer().balance(); }

torch::optim::Optimizer& ZeroRedundancyOptimizerBase::local_optimizer() const {
  impl_->optimizer().set_options(param_groups());
  return impl_->optimizer().local();
}

std::vector<at::Tensor> ZeroRedundancyOptimizerBase::gradients() const {
  std::vector<at::Tensor> found;
  if (options().stage() == 1) {
    for (const auto& group : param_groups()) {
      for (const auto& p : group.params()) {
        if (p.grad().defined()) found.push_back(p.grad());
      }
    }
    return found;
  }
  for (const auto& chunk : impl_->optimizer().chunks()) {
    for (auto& gradient : gradients_of(chunk, joined_pieces(chunk))) {
      if (gradient.defined()) found.push_back(std::move(gradient));
    }
  }
  return found;
}

std::vector<ShardedGradients> ZeroRedundancyOptimizerBase::gradient_sets() const {
  std::unordered_map<const void*, ParameterLayout> layouts;
  for (auto& layout : layouts_of(impl_->state().wrapped())) {
    const auto* key = layout.local.unsafeGetTensorImpl();
    layouts.emplace(key, std::move(layout));
  }
  const bool is_divided = options().stage() == 2;
  GradientSets sets;
  const auto add = [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    const auto found = layouts.find(parameter.unsafeGetTensorImpl());
    const auto layout = found == layouts.end() ? whole_layout("", parameter) : found->second;
    DDP_CHECK_VALUE(
        !layout.stage,
        "clip_grad_norm_: expected an optimizer of a whole model, got a ZeroRedundancyOptimizer of "
        "a pipeline's stage, which knows of no other stage. Use its stage 1, and call "
        "clip_grad_norm_(module, max_norm, mesh).");
    std::vector<ProcessGroup> groups;
    for (const auto& group : layout.sharded_over) {
      if (group->getSize() > 1) groups.push_back(group);
    }
    if (is_divided) groups.push_back(impl_->optimizer().group());
    sets.add(layout, groups, gradient);
  };
  SeenTensors seen;
  for (const auto& group : param_groups()) {
    for (const auto& p : group.params()) {
      if (seen.add(p)) add(p, is_divided ? at::Tensor() : p.grad());
    }
  }
  if (!is_divided) return sets.sets();
  for (const auto& chunk : impl_->optimizer().chunks()) {
    const auto pieces = joined_pieces(chunk);
    const auto gradients = gradients_of(chunk, pieces);
    for (size_t i = 0; i < gradients.size(); ++i) {
      add(chunk.flat.parameters()[pieces[i].slot], gradients[i]);
    }
  }
  return sets.sets();
}

const ZeroOptions& ZeroRedundancyOptimizerBase::options() const { return impl_->options(); }

const ProcessGroup& ZeroRedundancyOptimizerBase::process_group() const {
  return impl_->optimizer().group();
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizerBase::consolidated(int to) const {
  impl_->check();
  // If one rank alone builds the whole and fails, abort_on_error() stops the others' wait for it.
  std::unique_ptr<torch::optim::Optimizer> whole;
  impl_->state().monitor().abort_on_error(
      [] { return std::string("gathering the state of a ZeroRedundancyOptimizer"); },
      [&] {
        if (to < 0 || to == impl_->optimizer().group()->getRank()) whole = unsharded();
        impl_->optimizer().collect_state(whole.get());
      });
  return whole;
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizerBase::unsharded() const {
  return impl_->kind().make(param_groups(), defaults(), /*places=*/{});
}

void ZeroRedundancyOptimizerBase::load_whole(const torch::optim::Optimizer& whole) {
  impl_->optimizer().load_state(whole);
  auto& groups = param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].set_options(whole.param_groups()[g].options().clone());
  }
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizerBase::join_hook(const JoinOptions& /*options*/) {
  DDP_CHECK_VALUE(
      options().stage() == 2 || !impl_->state().options().find_unused_parameters(),
      "ZeroRedundancyOptimizer: expected stage 2 in a join() of a model with "
      "find_unused_parameters, where ranks without input do not know which gradients are old, got "
      "stage 1. Set stage(2).");
  return std::make_unique<ZeroJoinHook>(*impl_);
}

c10::Device ZeroRedundancyOptimizerBase::join_device() const { return impl_->state().device(); }

ProcessGroup ZeroRedundancyOptimizerBase::join_process_group() const {
  return impl_->state().group();
}

c10::IValue own_shard(const ZeroRedundancyOptimizerBase& optimizer) {
  return optimizer.impl_->optimizer().own_state(optimizer.param_groups());
}

void take_from_shard(ZeroRedundancyOptimizerBase& optimizer, const c10::IValue& shard) {
  optimizer.impl_->optimizer().take_state(optimizer.param_groups(), shard);
}

}  // namespace ddp
