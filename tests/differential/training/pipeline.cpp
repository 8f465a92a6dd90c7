// Layers as stages of a pipeline: plain ones and in wrappers, also several a rank, idle ones, and a
// parameter on two.
#include <ddp/full_state_dict.h>
#include <ddp/pipeline.h>

#include "differential/run.h"

namespace ddp::differential {

DDP_SOURCE(
    chunks_of,
    /// The stages of a rank; the first and the last one have the table.
    inline std::vector<std::shared_ptr<Layer>> chunks_of(
        Net& net, const std::vector<int64_t>& stages, const Rank& pp, int count,
        const std::shared_ptr<Table>& table) {
      std::vector<std::shared_ptr<Layer>> chunks;
      for (int stage = pp.rank; stage < pp.size * count; stage += pp.size) {
        auto chunk = std::make_shared<Net>();
        if (table && stage == 0) chunk->add("table", table);
        for (size_t i = 0; i < stages.size(); ++i) {
          if (stages[i] != stage) continue;
          chunk->register_module(net.named_children()[i].key(), net.children()[i]);
          chunk->calls.push_back(net.calls[i]);
        }
        if (table && stage + 1 == pp.size * count) {
          if (stage > 0) chunk->register_module("table", table);
          chunk->calls.push_back([table](at::Tensor x) { return x.matmul(table->weight.t()); });
        }
        chunks.push_back(chunk);
      }
      return chunks;
    });
DDP_SOURCE(
    inputs_of, inline std::vector<at::Tensor> inputs_of(const Rank& pp, const at::Tensor& x) {
      if (pp.rank > 0) return {};
      return {x};
    });

namespace {

bool is_trained(const torch::nn::Module& net) {
  const auto all = net.parameters();
  return std::any_of(all.begin(), all.end(), [](const auto& p) { return p.requires_grad(); });
}

class Pipeline : public Training {
 public:
  explicit Pipeline(RankRun& run) : Training(run) {
    recompute(run);
    auto& trace = run.trace;
    const auto& p = run.program;
    const auto& pp = run.pp;
    const int count = p.is("schedule", "interleaved") ? 2 : 1;
    std::string text = "const std::vector<int64_t> stages{";
    const auto stages = stages_of(p, pp.size * count);
    for (const auto stage : stages) text += std::to_string(stage) + ", ";
    trace.say(
        text + "}; const int count = " + std::to_string(count) + "; std::shared_ptr<Table> table;");
    std::shared_ptr<Table> table;
    trace.use("Table");
    if (p.has("tied_table"))
      DDP_DO(trace, table = std::make_shared<Table>();
             table->weight.set_data(values(5 + pp.rank, {4, 4})));
    if (p.has("tied_table")) run.parameters.insert("table.weight");
    auto& net = run.net;
    trace.use("chunks_of"), trace.use("inputs_of");
    trace.say("auto chunks = chunks_of(*net, stages, pp, count, table);");
    auto chunks = chunks_of(*net, stages, pp, count, table);
    for (auto& chunk : chunks) {
      auto& calls = std::dynamic_pointer_cast<Net>(chunk)->calls;
      calls.emplace_back([this](at::Tensor x) {
        if (run_.layers[0]->fails) throw std::runtime_error(kDeliberate);
        return x;
      });
    }
    DDP_DO(trace, net = std::make_shared<Net>();
           for (size_t c = 0; c < chunks.size(); ++c)
               net->register_module("chunk" + std::to_string(c), chunks[c]));
    make_options(table);
    if (p.is("stage", "ddp") && is_trained(*net)) {
      run_.trace.say("std::vector<DistributedDataParallel<std::shared_ptr<Layer>>> wrapped;");
      const auto options = replicas_options(run);
      wrap<DistributedDataParallel<std::shared_ptr<Layer>>>(chunks, options);
    } else if (p.is("stage", "fsdp|fsdp_each")) {
      trace.say("std::vector<FullyShardedDataParallel<std::shared_ptr<Layer>>> wrapped;");
      const auto options = sharded_options(run);
      wrap<FullyShardedDataParallel<std::shared_ptr<Layer>>>(chunks, options);
    } else {
      DDP_DO(trace, auto& wrapped = chunks; (void)wrapped);
      make(chunks);
    }
  }

  at::Tensor forward(const at::Tensor& x) override {
    return pipeline_->eval(inputs_of(run_.pp, x));
  }
  std::shared_ptr<void> no_sync() override { return nullptr; }
  void sync_in_backward(const at::Tensor&) override {}
  torch::nn::Module& wrapper() override { return *pipeline_; }
  bool has_whole_gradients() const override { return !run_.program.is("stage", "fsdp|fsdp_each"); }
  std::vector<std::pair<std::string, at::Tensor>> whole() override {
    return gathered(run_, *pipeline_);
  }
  void add_to(Checkpointer& checkpointer) override {
    checkpointer.add("model", *pipeline_).add("optimizer", *run_.optimizer);
  }
  void clip(torch::optim::Optimizer& optimizer) override {
    const auto& label = run_.program.label("clip");
    auto& model = *pipeline_;
    const auto& pp = run_.pp;
    if (label == "2") DDP_DO(run_.trace, clip_grad_norm_(model, 0.5, 2, {pp.group}));
    if (label == "1") DDP_DO(run_.trace, clip_grad_norm_(model, 0.5, 1, {pp.group}));
    if (label == "inf") DDP_DO(run_.trace, clip_grad_norm_(model, 0.5, INFINITY, {pp.group}));
    if (label == "value") Training::clip(optimizer);
  }
  void run_batch(int step, int batch) override;

 private:
  void make_options(const std::shared_ptr<Table>& table) {
    auto& trace = run_.trace;
    const auto& p = run_.program;
    const auto& pp = run_.pp;
    auto& stage_options = options_;
    trace.say("PipelineOptions stage_options;");
    trace.say(
        "stage_options.process_group(pp.group).microbatches(" + p.label("microbatches") + ");");
    stage_options.process_group(pp.group).microbatches(p.number("microbatches"));
    if (p.is("schedule", "gpipe")) DDP_DO(trace, stage_options.schedule(PipelineSchedule::GPipe));
    if (p.is("schedule", "eager|interleaved"))
      DDP_DO(trace, stage_options.schedule(PipelineSchedule::Interleaved));
    if (p.is("loss", "sum")) DDP_DO(trace, stage_options.scale_grads(false));
    if (p.is("stage", "fsdp_each")) DDP_DO(trace, stage_options.reduce_each(true));
    if (run_.scaler) {
      auto& scaler = *run_.scaler;
      DDP_DO(trace, stage_options.scale_loss([&](const at::Tensor& loss) {
        return scaler.scale(loss);
      }));
    }
    if (table && pp.size > 1) {
      DDP_DO(
          trace, if (const auto ends = new_group({0, pp.size - 1}, pp.group))
                     stage_options.tied({{table->weight, ends}}));
    }
  }

  template <typename M, typename Options>
  void wrap(const std::vector<std::shared_ptr<Layer>>& chunks, const Options& options) {
    std::vector<M> wrapped;
    DDP_DO(run_.trace, for (auto& chunk : chunks) wrapped.emplace_back(chunk, options));
    make(wrapped);
  }

  template <typename M>
  void make(std::vector<M> wrapped) {
    auto& trace = run_.trace;
    const bool mean = !run_.program.is("loss", "sum");
    trace.use("loss_of");
    trace.say(
        "bool overflows = false; const auto loss = [&](const at::Tensor& y, const at::Tensor& "
        "target) { return loss_of(y, target, " +
        std::string(mean ? "true" : "false") + ") * (overflows ? 1e306 : 1); };");
    const auto loss = [this, mean](const at::Tensor& y, const at::Tensor& target) {
      if (output_throws_)
        y.register_hook([](const at::Tensor&) { throw std::runtime_error(kDeliberate); });
      auto loss = loss_of(y, target, mean) * (overflows_ ? 1e306 : 1);
      return loss_throws_ ? throws_in_backward(loss) : loss;
    };
    const auto& pp = run_.pp;
    if (wrapped.size() == 1) {
      trace.say("PipelineStage model(wrapped[0], loss, stage_options);");
      pipeline_ = std::make_unique<PipelineStage<M>>(wrapped[0], loss, options_);
    } else {
      trace.say("PipelineStage model(wrapped, pp.rank, pp.size, loss, stage_options);");
      pipeline_ = std::make_unique<PipelineStage<M>>(wrapped, pp.rank, pp.size, loss, options_);
    }
  }

  PipelineOptions options_;
  std::unique_ptr<PipelineStageBase> pipeline_;
  bool overflows_ = false, loss_throws_ = false, output_throws_ = false;
};

void Pipeline::run_batch(int step, int batch) {
  const auto& p = run_.program;
  auto& trace = run_.trace;
  const auto& pp = run_.pp;
  const auto rows = rows_of(p, step, batch);
  const auto own_rows = rows[static_cast<size_t>(run_.self.rank)];
  for (auto& layer : run_.layers) layer->fails = throws(run_, step, "forward");
  loss_throws_ = throws(run_, step, "loss_function"),
  output_throws_ = throws(run_, step, "output_hook");
  overflows_ = overflows(p, step, run_.self.rank);
  std::vector<int64_t> overflow;
  for (int rank = 0; rank < run_.self.size; ++rank)
    overflow.push_back(overflows(p, step, rank) ? 1 : 0);
  if (p.has("scaler")) trace.say("overflows = " + run_.of_rank(overflow) + ";");
  const auto own = run_.inputs(step, batch);
  const auto &x = own.x, &target = own.target;
  trace.say(
      "model.step(inputs_of(pp, " + own.x_text +
      "), pp.rank + 1 < pp.size ? at::Tensor() : " + own.target_text + ");");
  const auto result =
      pipeline_->step(inputs_of(pp, x), pp.rank + 1 < pp.size ? at::Tensor() : target);
  if (result.losses.empty()) return;
  at::Tensor sum;
  for (size_t i = 0; i < result.losses.size(); ++i) {
    const auto part = static_cast<double>(x.tensor_split(p.number("microbatches"))[i].size(0));
    const auto loss =
        result.losses[i] * (p.is("loss", "sum") ? 1 : part / static_cast<double>(own_rows));
    sum = sum.defined() ? sum + loss : loss;
  }
  if (!overflows_)
    note(run_.record, std::to_string(step) + " loss of batch " + std::to_string(batch), sum);
  TORCH_CHECK(result.output.sizes() == target.sizes(), "the output has ", result.output.sizes());
}

}  // namespace

std::unique_ptr<Training> wrap_pipeline(RankRun& run) { return std::make_unique<Pipeline>(run); }

}  // namespace ddp::differential
