// FullyShardedDataParallel: units of any nesting, their options, hybrid sharding.
#include <ddp/fully_sharded.h>

#include "differential/run.h"

namespace ddp::differential {
namespace {

using Unit = FullyShardedDataParallel<std::shared_ptr<Layer>>;

FullyShardedOptions sharded_options(RankRun& run) {
  const auto& p = run.program;
  auto& trace = run.trace;
  const auto& self = run.self;
  trace.say("FullyShardedOptions options;");
  FullyShardedOptions options;
  if (p.is("sharding", "hybrid")) {
    DDP_DO(trace, options.mesh(init_device_mesh({2, 2}, {"replicate", "shard"}, self.group)));
  } else {
    DDP_DO(trace, options.process_group(self.group));
  }
  if (p.is("sharding", "kept")) DDP_DO(trace, options.reshard_after_forward(false));
  if (p.is("sharding", "no_prefetch")) DDP_DO(trace, options.prefetch(0));
  return options;
}

bool has_parameters(const std::shared_ptr<Layer>& layer) { return !layer->parameters(false).empty() || !layer->parameters().empty(); }

class Sharded : public Training {
 public:
  explicit Sharded(RankRun& run) : Training(run) {
    const auto options = sharded_options(run);
    const auto& units = run.program.label("units");
    if (units == "each" || units == "no_root" || units == "nested") {
      for (size_t i = 0; i < run.layers.size(); ++i) make_unit(i, options);
    }
    if (units == "pairs" || units == "nested") join_pairs(options);
    if (units == "sequential") make_sequential(options);
    recompute(run);
    run.add_calls();
    if (units == "no_root") return;
    run.trace.say("FullyShardedDataParallel model(std::shared_ptr<Layer>(net), options);");
    root_ = std::make_unique<Unit>(std::shared_ptr<Layer>(run.net), options);
  }

  at::Tensor forward(const at::Tensor& x) override {
    return root_ ? (*root_)->forward(x) : run_.net->forward(x);
  }
  std::shared_ptr<void> no_sync() override { return std::shared_ptr<NoSyncGuard>(new NoSyncGuard((*root_)->no_sync())); }
  void sync_in_backward(const at::Tensor& loss) override { (*root_)->sync_in_backward(loss); }
  torch::nn::Module& wrapper() override {
    return root_ ? static_cast<torch::nn::Module&>(**root_) : *run_.net;
  }
  bool has_whole_gradients() const override { return false; }
  std::vector<std::pair<std::string, at::Tensor>> whole() override {
    std::vector<std::unique_ptr<SummonFullParams>> whole;
    if (root_) {
      whole.push_back(std::make_unique<SummonFullParams>(**root_));
    } else {
      for (auto& [i, unit] : units_) whole.push_back(std::make_unique<SummonFullParams>(*unit));
    }
    auto result = Training::whole();
    for (auto& item : result) item.second = item.second.detach().clone();
    return result;
  }
  void clip(torch::optim::Optimizer& optimizer) override {
    const auto& label = run_.program.label("clip");
    auto& model = root_ ? **root_ : *units_.begin()->second;
    if (label == "2") {
      DDP_DO(run_.trace, clip_grad_norm_(model, 0.5));
    } else if (label == "1") {
      DDP_DO(run_.trace, clip_grad_norm_(model, 0.5, 1));
    } else if (label == "inf") {
      DDP_DO(run_.trace, clip_grad_norm_(model, 0.5, INFINITY));
    } else {
      Training::clip(optimizer);
    }
  }
  void add_to(Checkpointer& checkpointer) override {
    checkpointer.add("model", *root_).add("optimizer", *run_.optimizer);
  }

 private:
  void make_unit(size_t i, const FullyShardedOptions& options) {
    if (!has_parameters(run_.layers[i])) return;
    const auto id = std::to_string(i);
    run_.trace.say("auto unit" + id + " = FullyShardedDataParallel(std::dynamic_pointer_cast<Layer>(net->children()[" + id + "]), options);");
    auto unit = Unit(run_.layers[i], options);
    run_.trace.say("net->replace_module(net->named_children()[" + id + "].key(), unit" + id + ".ptr());");
    run_.net->replace_module(run_.net->named_children()[i].key(), unit.ptr());
    run_.trace.say("net->calls[" + id + "] = [unit" + id + "](at::Tensor x) mutable { return unit" + id + "->forward(x); };");
    run_.net->calls[i] = [unit](at::Tensor x) mutable { return unit->forward(std::move(x)); };
    run_.units[i] = unit.ptr();
    units_.emplace(i, unit);
  }

  /// Makes a unit of the first half of the layers, and one of the others.
  void join_pairs(const FullyShardedOptions& options) {
    // TODO
    (void)options;
  }
  void make_sequential(const FullyShardedOptions& options) { (void)options; }

  std::map<size_t, Unit> units_;
  std::unique_ptr<Unit> root_;
};

}  // namespace

std::unique_ptr<Training> wrap_sharded(RankRun& run) { return std::make_unique<Sharded>(run); }

}  // namespace ddp::differential
