// FullyShardedDataParallel: units of any nesting, their options, hybrid sharding.
#include <ddp/fully_sharded.h>

#include "differential/run.h"

namespace ddp::differential {
namespace {

using Unit = FullyShardedDataParallel<std::shared_ptr<Layer>>;

}  // namespace

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
  if (p.is("sharding", "ignored")) {
    std::vector<std::string> names;
    for (const auto& item : run.net->named_parameters()) {
      if (item.key().substr(0, 2) == "a.") names.push_back(item.key());
    }
    trace.say("std::vector<std::string> names;");
    trace.say(
        "for (const auto& item : net->named_parameters()) if (item.key().substr(0, 2) == \"a.\") "
        "names.push_back(item.key());");
    DDP_DO(trace, options.ignored_parameters(names));
  }
  if (!p.is("precision", "double|float|autocast")) set_precision(run, options);
  if (p.is("sharding", "kept")) DDP_DO(trace, options.reshard_after_forward(false));
  if (p.is("sharding", "no_prefetch")) DDP_DO(trace, options.prefetch(0));
  if (p.is("sharding", "offloaded")) DDP_DO(trace, options.cpu_offload(true));
  return options;
}

namespace {

bool has_parameters(const std::shared_ptr<Layer>& layer) {
  return !layer->parameters(false).empty() || !layer->parameters().empty();
}

class Sharded : public Training {
 public:
  explicit Sharded(RankRun& run) : Training(run) {
    const auto options = sharded_options(run);
    const auto& units = run.program.label("units");
    if (units == "each" || units == "no_root" || units == "nested") {
      for (size_t i = 0; i < run.layers.size(); ++i) make_unit(i, options);
    }
    if (units == "pairs" || units == "nested") recompute(run), join_pairs(options);
    if (units == "each" || units == "no_root" || units == "root") recompute(run);
    if (units == "sequential") make_sequential(options);
    run.add_calls();
    if (units == "no_root") return;
    run.trace.say("FullyShardedDataParallel model(std::shared_ptr<Layer>(net), options);");
    root_ = std::make_unique<Unit>(std::shared_ptr<Layer>(run.net), options);
  }

  at::Tensor forward(const at::Tensor& x) override {
    return root_ ? (*root_)->forward(x) : run_.net->forward(x);
  }
  std::shared_ptr<void> no_sync() override {
    return std::shared_ptr<NoSyncGuard>(new NoSyncGuard((*root_)->no_sync()));
  }
  void sync_in_backward(const at::Tensor& loss) override { (*root_)->sync_in_backward(loss); }
  torch::nn::Module& wrapper() override {
    return root_ ? static_cast<torch::nn::Module&>(**root_) : *run_.net;
  }
  bool has_whole_gradients() const override { return false; }
  std::vector<std::pair<std::string, at::Tensor>> whole() override {
    if (run_.program.has("mesh")) return gathered(run_, wrapper());
    if (!run_.program.is("precision", "double|float|autocast")) return in_own_dtype();
    std::vector<std::unique_ptr<SummonFullParams>> whole;
    if (root_) {
      whole.push_back(std::make_unique<SummonFullParams>(**root_));
    } else {
      for (auto& [i, unit] : run_.units) whole.push_back(std::make_unique<SummonFullParams>(*unit));
    }
    auto result = Training::whole();
    for (auto& item : result) item.second = item.second.detach().clone();
    return result;
  }
  void clip(torch::optim::Optimizer& optimizer) override {
    if (run_.program.is("clip", "value|torch")) return Training::clip(optimizer);
    clip_norm_of(root_ ? **root_ : *run_.units.begin()->second);
  }
  void add_to(Checkpointer& checkpointer) override {
    checkpointer.add("model", *root_).add("optimizer", *run_.optimizer);
  }

 private:
  void make_unit(size_t i, const FullyShardedOptions& options) {
    if (!has_parameters(run_.layers[i])) return;
    const auto id = std::to_string(i);
    run_.trace.say(
        "auto unit" + id +
        " = FullyShardedDataParallel(std::dynamic_pointer_cast<Layer>(net->children()[" + id +
        "]), options);");
    auto unit = Unit(run_.layers[i], options);
    run_.trace.say(
        "net->replace_module(net->named_children()[" + id + "].key(), unit" + id + ".ptr());");
    run_.net->replace_module(run_.net->named_children()[i].key(), unit.ptr());
    run_.trace.say(
        "net->calls[" + id + "] = [unit" + id + "](at::Tensor x) mutable { return unit" + id +
        "->forward(x); };");
    run_.net->calls[i] = [unit](at::Tensor x) mutable { return unit->forward(std::move(x)); };
    run_.units.emplace(i, unit);
  }

  /// Puts each two layers into a net of their own, which becomes a unit.
  void join_pairs(const FullyShardedOptions& options) {
    auto& net = run_.net;
    run_.trace.say(
        "auto pairs = std::make_shared<Net>(); auto& flat = *net; std::shared_ptr<Net> pair;");
    auto pairs = std::make_shared<Net>();
    auto& flat = *net;
    std::shared_ptr<Net> pair;
    for (size_t i = 0; i < flat.calls.size(); ++i) {
      run_.trace.say("{ const size_t i = " + std::to_string(i) + ";");
      if (i % 2 == 0) DDP_DO(run_.trace, pair = std::make_shared<Net>());
      DDP_DO(
          run_.trace,
          pair->register_module(flat.named_children()[i].key(), flat.named_children()[i].value()));
      DDP_DO(run_.trace, pair->calls.push_back(flat.calls[i]));
      if (i % 2 == 1 || i + 1 == flat.calls.size()) add_pair(*pairs, pair, i / 2, options);
      run_.trace.say("}");
    }
    DDP_DO(run_.trace, net = pairs);
  }
  void add_pair(
      Net& pairs, std::shared_ptr<Net> pair, size_t number, const FullyShardedOptions& options) {
    const auto name = "pair" + std::to_string(number);
    if (pair->parameters().empty()) {
      run_.trace.say("pairs->add(\"" + name + "\", pair);");
      pairs.add(name, pair);
      return;
    }
    run_.trace.say("FullyShardedDataParallel unit(std::shared_ptr<Layer>(pair), options);");
    Unit unit(pair, options);
    run_.trace.say("pairs->register_module(\"" + name + "\", unit.ptr());");
    pairs.register_module(name, unit.ptr());
    run_.trace.say(
        "pairs->calls.push_back([unit](at::Tensor x) mutable { return unit->forward(x); });");
    pairs.calls.push_back([unit](at::Tensor x) mutable { return unit->forward(std::move(x)); });
  }

  /// Lets fully_shard() cut a Sequential of all layers.
  void make_sequential(const FullyShardedOptions& options) {
    auto& net = run_.net;
    auto& trace = run_.trace;
    trace.say("torch::nn::Sequential layers; auto cut = std::make_shared<Net>();");
    torch::nn::Sequential layers;
    auto cut = std::make_shared<Net>();
    for (size_t i = 0; i < run_.layers.size(); ++i)
      layers->push_back(layer_name(i), run_.layers[i]);
    trace.say(
        "for (auto& child : net->named_children()) layers->push_back(child.key(), "
        "std::dynamic_pointer_cast<Layer>(child.value()));");
    DDP_DO(trace, fully_shard(layers, 1, options));
    DDP_DO(trace, cut->register_module("layers", layers));
    DDP_DO(
        trace, cut->calls.push_back([layers](at::Tensor x) mutable { return layers->forward(x); }));
    DDP_DO(trace, net = cut);
  }

  /// While parameters are whole, they have the dtype of forward.
  std::vector<std::pair<std::string, at::Tensor>> in_own_dtype() {
    std::vector<std::pair<std::string, at::Tensor>> result;
    for (int rank = 0; rank < run_.self.size; ++rank) {
      for (const auto& item : full_state_dict(*root_, rank, run_.self.group)) {
        const auto name = plain_name(item.key());
        if (run_.parameters.count(name) > 0) result.emplace_back(name, item.value());
      }
    }
    return result;
  }

  std::unique_ptr<Unit> root_;
};

}  // namespace

std::unique_ptr<Training> wrap_sharded(RankRun& run) { return std::make_unique<Sharded>(run); }

}  // namespace ddp::differential
