// DistributedDataParallel with its options, and ZeroRedundancyOptimizer over it.
#include "differential/run.h"
#include "differential/training/optimizers.h"

namespace ddp::differential {

DDP_SOURCE(
    TupleNet, struct TupleNet
    : torch::nn::Module {
      explicit TupleNet(std::shared_ptr<Net> inner)
          : net(register_module("net", std::move(inner))) {}
      std::tuple<at::Tensor, std::vector<at::Tensor>> forward(
          at::Tensor x, const at::Tensor& shift) {
        auto y = net->forward(x);
        return {y + shift, {y}};
      }
      std::shared_ptr<Net> net;
    });
DDP_SOURCE(
    MapNet, struct MapNet
    : torch::nn::Module {
      explicit MapNet(std::shared_ptr<Net> inner) : net(register_module("net", std::move(inner))) {}
      std::map<std::string, at::Tensor> forward(const std::vector<at::Tensor>& x) {
        return {{"y", net->forward(x.at(0))}};
      }
      std::shared_ptr<Net> net;
    });
DDP_SOURCE(StructNet,
struct Output { at::Tensor y; std::optional<at::Tensor> other; };
inline void visit_tensors(const Output& output, const TensorSink& sink) { sink(output.y); }
struct StructNet : torch::nn::Module {
  explicit StructNet(std::shared_ptr<Net> inner) : net(register_module("net", std::move(inner))) {}
  Output forward(at::Tensor x) { return {net->forward(x), std::nullopt}; }
  std::shared_ptr<Net> net;
});

DistributedDataParallelOptions replicas_options(RankRun& run) {
  const auto& p = run.program;
  auto& trace = run.trace;
  const auto& self = run.self;
  trace.say("DistributedDataParallelOptions options;");
  DistributedDataParallelOptions options;
  DDP_DO(trace, options.process_group(self.group));
  if (p.is("regions", "pairs")) {
    auto& local = run.region;
    DDP_DO(trace, options.process_group(local));
  }
  if (!p.is("precision", "double|float|autocast")) set_precision(run, options);
  if (p.is("reduction", "Sum")) DDP_DO(trace, options.reduction(Reduction::Sum));
  if (p.is("reduction", "SampleWeighted"))
    DDP_DO(trace, options.reduction(Reduction::SampleWeighted));
  if (p.is("bucket", "one_element")) DDP_DO(trace, options.bucket_cap_mb(8.0 / (1 << 20)));
  if (p.is("bucket", "list")) DDP_DO(trace, options.bucket_cap_mb_list({1e-4, 1e-3}));
  if (p.is("bucket", "huge")) DDP_DO(trace, options.bucket_cap_mb(1000));
  if (p.is("as_view", "yes")) DDP_DO(trace, options.gradient_as_bucket_view(true));
  if (p.is("graph", "find_unused")) DDP_DO(trace, options.find_unused_parameters(true));
  if (p.is("graph", "static")) DDP_DO(trace, options.static_graph(true));
  if (p.is("buffers_of", "each")) DDP_DO(trace, options.broadcast_buffers(false));
  if (p.is("buffers_of", "each_after_construction"))
    DDP_DO(trace, options.forward_sync_buffers(false));
  if (p.is("buffers_of", "rank_0_later")) DDP_DO(trace, options.init_sync(false));
  // Ranks go on with parameters of their own.
  if (run.label() == "averager" && p.has("reload")) DDP_DO(trace, options.check_replicas_every(0));
  if (p.is("replay", "yes")) DDP_DO(trace, options.replay_every(1));
  if (p.is("nonfinite", "found")) DDP_DO(trace, options.find_nonfinite(true));
  if (p.is("lazy_buckets", "yes")) {
    DDP_DO(
        trace, options.lazy_bucket_allocation(true)
                   .stats_every(1)
                   .check_replicas_every(1)
                   .vote(true)
                   .check_inputs(false));
  }
  return options;
}

namespace {

class Replicas : public Training {
 public:
  explicit Replicas(RankRun& run) : Training(run) {
    recompute(run);
    if (run.program.has("nested")) nest();
    run.add_calls();
    auto options = replicas_options(run);
    if (run.program.is("nested", "ignored")) {
      std::vector<std::string> names;
      run.trace.say("std::vector<std::string> names;");
      for (const auto& item : run.net->named_parameters()) {
        if (item.key().substr(0, 2) == "a.") names.push_back(item.key());
      }
      run.trace.say(
          "for (const auto& item : net->named_parameters()) if (item.key().substr(0, 2) == \"a.\") "
          "names.push_back(item.key());");
      DDP_DO(run.trace, options.parameters_to_ignore(names));
    }
    const auto& output = run.program.label("output");
    if (output == "tuple") {
      wrap_as<TupleNet>("TupleNet", options, [](auto& model, const at::Tensor& x) {
        return std::get<0>(model->forward(x, torch::zeros({4}, torch::kDouble)));
      });
    } else if (output == "map") {
      wrap_as<MapNet>("MapNet", options, [](auto& model, const at::Tensor& x) {
        return model->forward(std::vector<at::Tensor>{x}).at("y");
      });
    } else if (output == "own_struct") {
      wrap_as<StructNet>("StructNet", options, [](auto& model, const at::Tensor& x) {
        return model->forward(x).y;
      });
    } else {
      run.trace.say("DistributedDataParallel model(std::shared_ptr<Layer>(net), options);");
      const bool runs = output == "run";
      keep(
          DistributedDataParallel(std::shared_ptr<Layer>(run.net), options),
          [runs, net = run.net](auto& model, const at::Tensor& x) {
            return runs ? model->run([&] { return net->forward(x); }) : model->forward(x);
          });
    }
    register_hook(run, base_);
    const bool by_hand = run.program.is("stepping", "by_hand");
    if (by_hand) DDP_DO(run.trace, base_->require_manual_backward_finalization(true));
  }

  at::Tensor forward(const at::Tensor& x) override { return forward_(x); }
  std::string call(const std::string& x) const override {
    const auto& output = run_.program.label("output");
    if (output == "run") return "model->run([&] { return net->forward(" + x + "); })";
    if (output == "tuple")
      return "std::get<0>(model->forward(" + x + ", torch::zeros({4}, torch::kDouble)))";
    if (output == "map") return "model->forward(std::vector<at::Tensor>{" + x + "}).at(\"y\")";
    return "model->forward(" + x + ")" + (output == "own_struct" ? ".y" : "");
  }
  std::shared_ptr<void> no_sync() override {
    auto guard = std::shared_ptr<NoSyncGuard>(new NoSyncGuard(base_->no_sync()));
    return guard;
  }
  void sync_in_backward(const at::Tensor& loss) override { base_->sync_in_backward(loss); }
  torch::nn::Module& wrapper() override { return *base_; }
  bool has_whole_gradients() const override {
    return !run_.program.is("stepping", "in_backward") &&
           run_.label().find("zero2") == std::string::npos &&
           run_.label().find("overlap") == std::string::npos;
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    if (run_.label() == "ddp") {
      auto optimizer = Training::make_optimizer();
      return optimizer;
    }
    return make_zero_();
  }

  void join(const std::function<void()>& body) override {
    JoinOptions join;
    auto& optimizer = *run_.optimizer;
    std::vector<Joinable*> joined{base_};
    const bool sharded = run_.label() != "ddp";
    std::string text = "JoinOptions join;";
    if (run_.program.is("join", "by_active"))
      join.divide_by_initial_world_size(false),
          text += " join.divide_by_initial_world_size(false);";
    if (run_.program.is("join", "optimizers"))
      join.optimizers({&optimizer}), text += " join.optimizers({&optimizer});";
    if (run_.program.is("join", "disabled")) join.enable(false), text += " join.enable(false);";
    if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer)) joined.push_back(zero);
    ddp::join(joined, body, join);
    run_.trace.say("};");
    run_.trace.say(text);
    run_.trace.say(
        std::string("ddp::join({model.get()") + (sharded ? ", &optimizer}" : "}") +
        ", body, join);");
  }

  void add_to(Checkpointer& checkpointer) override { add_(checkpointer); }

 private:
  /// Wraps the first layer on its own, as a part of the net.
  void nest() {
    auto& net = run_.net;
    run_.trace.say("DistributedDataParallelOptions inner_options;");
    run_.trace.say(
        "DistributedDataParallel inner(std::dynamic_pointer_cast<Layer>(net->children()[0]), "
        "inner_options.process_group(self.group));");
    auto options = DistributedDataParallelOptions().process_group(run_.self.group);
    DistributedDataParallel inner(run_.layers[0], options);
    DDP_DO(run_.trace, net->replace_module("a", inner.ptr()));
    DDP_DO(
        run_.trace, net->calls[0] = [inner](at::Tensor x) mutable { return inner->forward(x); });
  }

  template <typename N, typename Forward>
  void wrap_as(
      const std::string& source, const DistributedDataParallelOptions& options, Forward forward) {
    run_.trace.use(source);
    run_.trace.say(
        "DistributedDataParallel model(std::make_shared<" + source + ">(net), options);");
    keep(DistributedDataParallel(std::make_shared<N>(run_.net), options), forward);
  }

  template <typename Model, typename Forward>
  void keep(Model model, Forward forward) {
    holder_ = model.ptr();
    base_ = model.get();
    forward_ = [model, forward](const at::Tensor& x) mutable { return forward(model, x); };
    make_zero_ = [this, model]() mutable { return make_zero(model); };
    add_ = [this, model](Checkpointer& checkpointer) mutable {
      checkpointer.add("model", model).add("optimizer", *run_.optimizer);
    };
  }

  template <typename Model>
  std::unique_ptr<torch::optim::Optimizer> make_zero(Model& model) {
    const auto& label = run_.label();
    auto options = ZeroOptions()
                       .stage(label.find("zero2") == 0 ? 2 : 1)
                       .overlap(label.find("overlap") != std::string::npos);
    const auto& kind = run_.program.label("optimizer");
    const auto groups = kind == "muon" ? run_.make_matrices() : run_.make_groups();
    run_.trace.say(
        "auto zero = ZeroOptions().stage(" + std::to_string(options.stage()) + ").overlap(" +
        (options.overlap() ? "true" : "false") + ");");
    if (run_.program.is("state_in", "file")) {
      options.offload_file("/tmp/ddp-state");  // each rank's has no name
      run_.trace.say("zero.offload_file(\"/tmp/ddp-state\");");
    }
#define MAKE(name, type, plain, values)                                                     \
  if (kind == (name)) {                                                                     \
    run_.trace.say("ZeroRedundancyOptimizer<" #type                                         \
                   "> optimizer(model, groups, " DDP_TEXT(values) ", zero);");              \
    return std::make_unique<ZeroRedundancyOptimizer<type>>(model, groups, values, options); \
  }
    DDP_OPTIMIZERS(MAKE)
    MAKE("muon", ddp::optim::Muon, ddp::optim::Muon, DDP_MUON)
#undef MAKE
    TORCH_CHECK(false, "no optimizer is called ", kind);
  }

  std::shared_ptr<void> holder_;
  DistributedDataParallelBase* base_ = nullptr;
  std::function<at::Tensor(const at::Tensor&)> forward_;
  std::function<std::unique_ptr<torch::optim::Optimizer>()> make_zero_;
  std::function<void(Checkpointer&)> add_;
};

}  // namespace

std::unique_ptr<Training> wrap_replicas(RankRun& run) { return std::make_unique<Replicas>(run); }

}  // namespace ddp::differential
