// Ranks, or regions of them, that train by themselves, and average parameters from time to time.
#include <ddp/diloco.h>
#include <ddp/model_averager.h>

#include "differential/rounding.h"
#include "differential/run.h"

namespace ddp::differential {
namespace {

DiLoCoOptions outer_options(RankRun& run) {
  const auto& p = run.program;
  const auto& self = run.self;
  auto& trace = run.trace;
  trace.say("DiLoCoOptions outer;");
  DiLoCoOptions outer;
  DDP_DO(trace, outer.sync_every(2));
  if (p.is("outer", "each_step")) DDP_DO(trace, outer.sync_every(1));
  if (p.is("outer", "plain"))
    DDP_DO(trace, outer.outer_lr(0.5).outer_momentum(0.5).nesterov(false));
  if (p.is("outer", "fragments")) DDP_DO(trace, outer.fragments(2));
  if (p.is("outer", "overlap")) DDP_DO(trace, outer.overlap(1).mix(0.25));
  if (p.is("wire", "float32")) DDP_DO(trace, outer.wire(DiLoCoWire::Float32));
  if (p.is("wire", "int8")) DDP_DO(trace, outer.wire(DiLoCoWire::Int8));
  if (p.is("wire", "feedback")) DDP_DO(trace, outer.error_feedback(true));
  if (p.is("regions", "each")) DDP_DO(trace, outer.regions(self.group));
  if (p.is("regions", "one")) DDP_DO(trace, outer.local(self.group));
  auto& local = run.region;
  if (p.is("regions", "pairs"))
    DDP_DO(
        trace, outer.local(local).regions(split_group(self.rank % 2 == 0 ? 0 : -1, 0, self.group)));
  return outer;
}

class ByThemselves : public Training {
 public:
  explicit ByThemselves(RankRun& run) : Training(run) {
    const auto& p = run.program;
    const auto& self = run.self;
    auto& trace = run.trace;
    if (p.is("regions", "pairs")) {
      trace.say("ProcessGroup local;");
      auto& local = run.region;
      DDP_DO(trace, local = split_group(self.rank / 2, 0, self.group));
    }
    if (is_wrapped(p)) {
      inner_ = wrap_replicas(run);
      if (p.is("locally", "no_sync")) {
        trace.say("const auto without_averages = model->no_sync();");
        guard_ = inner_->no_sync();
      }
    } else {
      recompute(run);
      run.add_calls();
      trace.say("auto& model = net;");
    }
  }

  at::Tensor forward(const at::Tensor& x) override {
    return inner_ ? inner_->forward(x) : run_.net->forward(x);
  }
  std::shared_ptr<void> no_sync() override { return inner_->no_sync(); }
  void sync_in_backward(const at::Tensor& loss) override { inner_->sync_in_backward(loss); }
  torch::nn::Module& wrapper() override { return inner_ ? inner_->wrapper() : *run_.net; }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() override {
    const auto& p = run_.program;
    const auto& self = run_.self;
    auto& trace = run_.trace;
    auto& net = run_.net;
    trace.use("unique");
    if (run_.label() == "diloco") {
      const auto outer = outer_options(run_);
      trace.say("auto averager = std::make_shared<DiLoCo>(unique(net->parameters()), outer);");
      averager_ = std::make_shared<DiLoCo>(unique(net->parameters()), outer);
    } else {
      trace.say("std::shared_ptr<ModelAverager> averager;");
      auto& averager = averager_;
      if (p.is("averager", "periodic"))
        DDP_DO(trace, averager = std::make_shared<PeriodicModelAverager>(2, 0, self.group));
      if (p.is("averager", "warm_up|optimizer"))
        DDP_DO(trace, averager = std::make_shared<PeriodicModelAverager>(2, 1, self.group));
    }
    return Training::make_optimizer();
  }

  void step(torch::optim::Optimizer& optimizer) override {
    if (!run_.program.is("averager", "optimizer")) return Training::step(optimizer);
    if (!local_) {
      run_.trace.say("PostLocalSGDOptimizer local_sgd(optimizer, averager);");
      local_ = std::make_unique<PostLocalSGDOptimizer>(run_.optimizer, averager_);
    }
    auto& local_sgd = *local_;
    DDP_DO(run_.trace, local_sgd.step());
  }
  void after_step() override {
    if (local_) return;
    auto& averager = averager_;
    auto& net = run_.net;
    auto& optimizer = *run_.optimizer;
    if (run_.program.is("averager", "warm_up")) {
      DDP_DO(run_.trace, averager->average_parameters(optimizer.param_groups()));
    } else {
      DDP_DO(run_.trace, averager->average_parameters(unique(net->parameters())));
    }
  }
  void finish() override {
    auto averager = std::dynamic_pointer_cast<DiLoCo>(averager_);
    if (averager) DDP_DO(run_.trace, averager->finish());
  }

  std::string parts() const override { return ""; }  // add_to() says them
  void add_to(Checkpointer& checkpointer) override {
    auto& optimizer = *run_.optimizer;
    auto& net = run_.net;
    auto& averager = averager_;
    DDP_DO(
        run_.trace, checkpointer.add_per_rank("model", *net)
                        .add_per_rank("optimizer", optimizer)
                        .add_per_rank("averager", *averager));
  }

 private:
  std::unique_ptr<Training> inner_;
  std::shared_ptr<void> guard_;
  std::shared_ptr<ModelAverager> averager_;
  std::unique_ptr<PostLocalSGDOptimizer> local_;
};

}  // namespace

std::unique_ptr<Training> wrap_by_themselves(RankRun& run) {
  return std::make_unique<ByThemselves>(run);
}

}  // namespace ddp::differential
