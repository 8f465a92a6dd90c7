#include "differential/run.h"
#include "differential/rounding.h"
#include "differential/training/optimizers.h"

#include <unistd.h>

#include <numeric>
#include <sstream>

namespace ddp::differential {
namespace {

DDP_SOURCE(
    add_gathered,
    /// Adds to a loss a product with the outputs of all ranks.
    inline at::Tensor add_gathered(
        const at::Tensor& loss, const at::Tensor& y, const ProcessGroup& group) {
      const auto own = y.sum(0, true);
      return loss + (functional::all_gather(own, 0, group) * own).sum() / 8;
    });
DDP_SOURCE(
    Throwing,
    /// SGD that throws where it is told to.
    struct Throwing
    : torch::optim::SGD {
      explicit Throwing(
          const std::vector<torch::optim::OptimizerParamGroup>& groups,
          const bool* throws = nullptr)
          : torch::optim::SGD(groups, torch::optim::SGDOptions(0.1)), throws(throws) {}
      at::Tensor step(LossClosure closure = nullptr) override {
        if (*throws) throw std::runtime_error("deliberate");
        return torch::optim::SGD::step(std::move(closure));
      }
      const bool* throws;
    });
// clang-format off
DDP_SOURCE(
    ThrowsInBackward,
    struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
      static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
      static torch::autograd::variable_list backward(
          torch::autograd::AutogradContext*, torch::autograd::variable_list) {
        throw std::runtime_error("deliberate");
      }
    });
// clang-format on

bool begins_equal(const RankRun& run) {
  return run.program.is("buffers_of", "rank_0_later") || run.program.is("sharding", "ignored") ||
         run.label() == "pipeline" || run.label() == "averager";
}

/// The layers of a program, as one rank makes them.
void build_net(RankRun& run) {
  run.trace.use("Net");
  run.trace.say("auto net = std::make_shared<Net>();");
  run.net = std::make_shared<Net>();
  const auto labels = run.program.layers();
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto& kind = layer_kinds().at(labels[i]);
    if (!kind.whole_source.empty())
      run.trace.use("use_clone"), run.trace.use("padded"), run.trace.use("attend");
    run.trace.use(kind.source);
    run.trace.say("net->add(\"" + layer_name(i) + "\", " + kind.call + ");");
    run.layers.push_back(kind.make(kind.whole_source.empty() ? run.self : run.tp, run.layers));
    if (run.program.is("cloned", "yes")) {
      run.trace.say("std::dynamic_pointer_cast<Layer>(net->children().back())->use_clones();");
      run.layers.back()->use_clones();
    }
    run.net->add(layer_name(i), run.layers.back());
  }
  auto& net = run.net;
  const auto& self = run.self;
  if (precision_of(run.program).module == torch::kFloat) {
    DDP_DO(run.trace, net->to(torch::kFloat));
  } else {
    DDP_DO(run.trace, net->to(torch::kDouble));
  }
  run.trace.use("set_values");
  if (begins_equal(run)) {
    DDP_DO(run.trace, set_values(*net, 1));
  } else {  // other ranks begin elsewhere: rank 0's values count
    DDP_DO(run.trace, set_values(*net, 1 + self.rank));
  }
  set_cut_values(run, begins_equal(run));
  for (const auto& item : net->named_parameters()) run.parameters.insert(item.key());
}

}  // namespace

std::string RankRun::of_rank(const std::vector<int64_t>& numbers) const {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << "std::vector<int64_t>{";
  for (size_t i = 0; i < numbers.size(); ++i) text << (i > 0 ? ", " : "") << numbers[i];
  text << "}[self.rank]";
  return text.str();
}

bool throws(const RankRun& run, int step, const std::string& place) {
  const auto& program = run.program;
  // What a rank throws between its collectives reaches the others in their next one.
  const int in_step = program.number("steps") - (program.is("exception", "loop|optimizer") ? 2 : 1);
  const int rank = program.has("join") ? 0 : run.world.size - 1;
  return program.is("exception", place) && run.world.rank == rank && step == in_step;
}

at::Tensor throws_in_backward(const at::Tensor& loss) { return ThrowsInBackward::apply(loss); }

std::unique_ptr<Training> wrap(RankRun& run) {
  if (run.label() == "pipeline") return wrap_pipeline(run);
  if (run.label() == "averager" || run.label() == "diloco") return wrap_by_themselves(run);
  return run.label() == "fsdp" ? wrap_sharded(run) : wrap_replicas(run);
}

std::vector<std::pair<std::string, at::Tensor>> Training::whole() {
  if (run_.program.has("mesh")) return gathered(run_, wrapper());
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : run_.net->named_parameters())
    result.emplace_back(plain_name(item.key()), item.value());
  return result;
}

std::unique_ptr<torch::optim::Optimizer> Training::make_optimizer() {
  return run_.make_optimizer();
}

std::vector<torch::optim::OptimizerParamGroup> RankRun::make_groups() {
  trace.use("unique");
  trace.say(
      "const auto trained = unique(net->parameters()); "
      "std::vector<torch::optim::OptimizerParamGroup> groups;");
  const auto trained = unique(net->parameters());
  const bool all = !program.is("groups", "two|reversed|reversed_later");
  if (all) trace.say("groups.emplace_back(trained);");
  for (const auto& group : groups_of(program, trained.size(), first_step)) {
    if (all) break;
    std::string members;
    for (const size_t i : group)
      members += (members.empty() ? "trained[" : ", trained[") + std::to_string(i) + "]";
    trace.say("groups.emplace_back(std::vector<at::Tensor>{" + members + "});");
  }
  return param_groups(program, trained, first_step);
}

std::vector<torch::optim::OptimizerParamGroup> RankRun::make_matrices() {
  trace.say("const auto split = ddp::optim::split_for_muon(*model);");
  const auto split = ddp::optim::split_for_muon(training->wrapper());
  trace.say("torch::optim::SGD rest(split.others, " DDP_TEXT(DDP_REST) ");");
  rest = make_second(split.others);
  trace.say(
      "const std::vector<torch::optim::OptimizerParamGroup> groups{torch::optim::"
      "OptimizerParamGroup(split.matrices)};");
  return {torch::optim::OptimizerParamGroup(split.matrices)};
}

std::unique_ptr<torch::optim::Optimizer> RankRun::make_optimizer() {
  if (program.is("optimizer", "muon")) {
    const auto groups = make_matrices();
    trace.say(
        "auto optimizer_pointer = std::make_shared<ddp::optim::Muon>(*model, groups, " DDP_TEXT(
            DDP_MUON) "); auto& optimizer = *optimizer_pointer;");
    return std::make_unique<ddp::optim::Muon>(training->wrapper(), groups, DDP_MUON);
  }
  const auto groups = make_groups();
  if (program.is("exception", "optimizer")) {
    trace.use("Throwing");
    trace.say(
        "auto optimizer_pointer = std::make_shared<Throwing>(groups); auto& optimizer = "
        "*optimizer_pointer;");
    return std::make_unique<Throwing>(groups, &optimizer_throws);
  }
  const auto& label = program.label("optimizer");
#define MAKE(name, type, plain, options)                                                      \
  if (label == (name)) {                                                                      \
    trace.say("auto optimizer_pointer = std::make_shared<" #type ">(groups, " #options ");"); \
    trace.say("auto& optimizer = *optimizer_pointer;");                                       \
    return std::make_unique<type>(groups, options);                                           \
  }
  DDP_OPTIMIZERS(MAKE)
#undef MAKE
  TORCH_CHECK(false, "no optimizer is called ", label);
}

void Training::clip(torch::optim::Optimizer& optimizer) {
  const auto& label = run_.program.label("clip");
  auto& net = run_.net;
  if (label == "value") {
    DDP_DO(run_.trace, clip_grad_value_(optimizer, 0.1));
  } else if (label == "torch") {
    DDP_DO(run_.trace, torch::nn::utils::clip_grad_norm_(unique(net->parameters()), 1e-3));
  } else if (run_.program.has("mesh") && run_.label() == "ddp") {
    clip_norm_of(wrapper());
  } else {
    if (label == "2") DDP_DO(run_.trace, clip_grad_norm_(optimizer, 0.5));
    if (label == "1") DDP_DO(run_.trace, clip_grad_norm_(optimizer, 0.5, 1));
    if (label == "inf") DDP_DO(run_.trace, clip_grad_norm_(optimizer, 0.5, INFINITY));
  }
}

void Training::clip_norm_of(torch::nn::Module& module) {
  const auto& label = run_.program.label("clip");
  auto* model = &module;
  if (label == "2") DDP_DO(run_.trace, clip_grad_norm_(*model, 0.5));
  if (label == "1") DDP_DO(run_.trace, clip_grad_norm_(*model, 0.5, 1));
  if (label == "inf") DDP_DO(run_.trace, clip_grad_norm_(*model, 0.5, INFINITY));
}

void Training::join(const std::function<void()>& body) { body(); }
void Training::step(torch::optim::Optimizer& optimizer) { DDP_DO(run_.trace, optimizer.step()); }

void RankRun::add_calls() {
  if (program.is("penalty", "inside")) {
    trace.use("penalty_of");
    DDP_DO(trace, net->calls.emplace_back([net = net.get()](at::Tensor x) {
      return x + penalty_of(unique(net->parameters()));
    }));
  }
  if (program.is("exception", "forward")) {
    net->calls.emplace_back([this](at::Tensor x) {
      if (layers[0]->fails) throw std::runtime_error(kDeliberate);
      return x;
    });
  }
}

void RankRun::make_scaler() {
  if (!program.has("scaler")) return;
  GradScalerOptions scaler_options;
  trace.say("GradScalerOptions scaler_options;");
  const bool sharded = label() == "fsdp" || program.is("stage", "fsdp|fsdp_each");
  if (sharded && pp.group)
    DDP_DO(trace, scaler_options.found_inf_groups({self.group, pp.group, tp.group}));
  if (!sharded && pp.group) DDP_DO(trace, scaler_options.found_inf_groups({pp.group, tp.group}));
  if (sharded && !pp.group) DDP_DO(trace, scaler_options.found_inf_groups({self.group}));
  if (program.is("precision", "half")) DDP_DO(trace, scaler_options.init_scale(64));
  trace.say("GradScaler scaler(scaler_options);");
  scaler = std::make_unique<GradScaler>(scaler_options);
}

void RankRun::build() {
  make_mesh(*this);
  make_stream();
  build_net(*this);
  const bool before = program.is("groups", "before_wrapping") && label() == "ddp";
  std::unique_ptr<c10::NoGradGuard> no_grad;
  if (program.is("wrapped_under", "no_grad")) no_grad = std::make_unique<c10::NoGradGuard>();
  if (before) optimizer = make_optimizer();
  make_scaler();
  training = wrap(*this);
  if (program.is("also_average", "yes")) {
    auto* model = dynamic_cast<DistributedDataParallelBase*>(&training->wrapper());
    const int first = begins_equal(*this) ? 3 : 3 + self.rank;
    trace.say("auto extra = values(" + std::to_string(first) + ", {2}).requires_grad_();");
    extra = values(first, {2}).requires_grad_();
    DDP_DO(trace, model->also_average({extra}));
  }
  if (!optimizer) optimizer = training->make_optimizer();
  if (program.has("schedule_of_rate")) make_schedule(*this);
  if (program.has("average")) make_average();
  if (program.is("stepping", "in_backward")) {
    trace.say("model->step_in_backward(optimizer_pointer);");
    dynamic_cast<DistributedDataParallelBase&>(training->wrapper()).step_in_backward(optimizer);
  }
  no_grad.reset();
}

/// All ranks, as the printed program calls them.
std::string world_name(const RankRun& run) { return run.pp.group ? "world" : "self"; }

/// Changes the process's working folder, while all ranks wait.
void RankRun::change_folder(const std::string& path) {
  const std::string all = world_name(*this);
  trace.say(
      "barrier(" + all + ".group); if (" + all + ".rank == 0) TORCH_CHECK(chdir(" +
      (path == "/" ? "\"/\"" : "checkpoints.path().c_str()") + ") == 0); barrier(" + all +
      ".group);");
  barrier(world.group);
  if (world.rank == 0) TORCH_CHECK(::chdir(path.c_str()) == 0, "chdir");
  barrier(world.group);
}

void RankRun::run() {
  build();
  std::unique_ptr<Checkpointer> checkpointer;
  if (program.has("reload")) {
    const bool moves = program.is("folder", "changes");
    const auto path = moves ? "checkpoints" : folder;
    if (moves) change_folder(folder);
    trace.say(
        "Checkpointer checkpointer(" +
        std::string(moves ? "\"checkpoints\"" : "checkpoints.path()") +
        ", CheckpointerOptions().process_group(" + world_name(*this) + ".group));");
    checkpointer =
        std::make_unique<Checkpointer>(path, CheckpointerOptions().process_group(world.group));
    training->add_to(*checkpointer);
    trace.say(training->parts());
    if (scaler) {
      // Ranks that train by themselves skip steps by themselves.
      const bool is_own = program.is("training", "averager|diloco");
      trace.say(
          is_own ? "checkpointer.add_per_rank(\"scaler\", scaler);"
                 : "checkpointer.add(\"scaler\", scaler);");
      is_own ? checkpointer->add_per_rank("scaler", *scaler) : checkpointer->add("scaler", *scaler);
    }
    if (rest) trace.say("checkpointer.add(\"rest\", rest);"), checkpointer->add("rest", *rest);
    if (schedule)
      trace.say("checkpointer.add(\"schedule\", *schedule);"),
          checkpointer->add("schedule", *schedule);
    with_batches([&](auto& batches) {
      const bool is_own = program.is("stream_division", "by_shard");
      trace.say(
          is_own ? "checkpointer.add_per_rank(\"batches\", batches);"
                 : "checkpointer.add(\"batches\", batches);");
      is_own ? checkpointer->add_per_rank("batches", batches)
             : checkpointer->add("batches", batches);
    });
    if (average)
      trace.say("checkpointer.add(\"average\", average);"), checkpointer->add("average", *average);
    if (first_step > 0) {
      trace.say("checkpointer.load_latest();");
      TORCH_CHECK(checkpointer->load_latest(), "the checkpoint is lost");
    }
    if (moves) change_folder("/");
  }
  if (program.has("join")) trace.say("const auto body = [&] {");
  const auto body = [&] {
    for (int step = first_step; step < last_step(); ++step) {
      if (!has_input(program, step, self.rank)) break;
      if (program.has("join")) {
        std::vector<int64_t> ends;
        for (int rank = 0; rank < self.size; ++rank)
          ends.push_back(has_input(program, step, rank) ? 0 : 1);
        trace.say("if (" + of_rank(ends) + ") return;");
      }
      run_step(step);
    }
  };
  if (program.has("join")) {
    training->join(body);  // which says the end of the body, too
  } else {
    body();
  }
  if (program.has("reload") && first_step == 0) {
    trace.say("checkpointer.save(" + std::to_string(last_step()) + ");");
    checkpointer->save(last_step());
    trace.say("checkpointer.wait();");
    checkpointer->wait();
  }
  if (last_step() < program.number("steps")) return;
  training->finish();
  note_values("end");
  if (average) note_average();
  say_sums();
}

void RankRun::run_step(int step) {
  trace.say("// step " + std::to_string(step));
  trace.say("{");
  auto& optimizer = *this->optimizer;
  DDP_DO(trace, zero_grad(optimizer));
  if (this->rest) {
    auto& rest = *this->rest;
    DDP_DO(trace, zero_grad(rest));
  }
  if (is_frozen(program, step)) {
    for (auto& p : layers[0]->parameters()) p.set_requires_grad(false);
    trace.say("for (auto& p : net->children()[0]->parameters()) p.set_requires_grad(false);");
    trace.say("model->refresh();");
    dynamic_cast<DistributedDataParallelBase&>(training->wrapper()).refresh();
  }
  for (auto& layer : layers) layer->used = uses_sometimes(program, step, self.rank);
  hook_throws = throws(*this, step, "comm_hook");
  optimizer_throws = throws(*this, step, "optimizer");
  if (program.has("unused")) {
    std::vector<int64_t> used;
    for (int rank = 0; rank < self.size; ++rank)
      used.push_back(uses_sometimes(program, step, rank) ? 1 : 0);
    trace.say(
        "for (auto& m : net->children()) std::dynamic_pointer_cast<Layer>(m)->used = " +
        of_rank(used) + ";");
  }
  run_passes(step);
  if (program.is("sharding", "ignored")) {
    auto& group = self.group;
    DDP_DO(
        trace, for (auto& p
                    : net->children()[0]->parameters()) if (p.grad().defined())
                   all_reduce(p.mutable_grad(), c10d::ReduceOp::AVG, group));
  }
  if (throws(*this, step, "loop")) throw std::runtime_error(kDeliberate);
  bool overflows = false;
  for (int rank = 0; rank < self.size; ++rank)
    overflows = overflows || differential::overflows(program, step, rank);
  if (scaler) {
    auto& scaler = *this->scaler;
    DDP_DO(trace, scaler.unscale_(optimizer));
  }
  if (extra.defined())
    note(record, std::to_string(step) + " gradient of extra", extra.grad()),
        extra.mutable_grad().reset();
  if (!overflows && training->has_whole_gradients()) {
    for (const auto& item : net->named_parameters()) {
      const auto name = plain_name(item.key());
      if (parameters_cut.count(name) == 0)
        note(record, std::to_string(step) + " gradient of " + name, item.value().grad());
    }
  }
  if (!overflows) training->clip(optimizer);
  if (scaler) {
    auto& scaler = *this->scaler;
    DDP_DO(trace, scaler.step(optimizer));
    DDP_DO(trace, scaler.update());
  } else if (!program.is("stepping", "in_backward")) {
    training->step(optimizer);
  }
  if (this->rest) {
    auto& rest = *this->rest;
    DDP_DO(trace, rest.step());
  }
  training->after_step();
  if (schedule) DDP_DO(trace, schedule->step());
  if (average) {
    trace.say("average.update();");
    average->update();
  }
  note_values(std::to_string(step));
  if (program.has("drawing")) draw_in_turn(*this, step);
  between(step);
  trace.say("}");
}

void RankRun::forward(int step, int batch) {
  const auto id = std::to_string(batch);
  const auto own = inputs(step, batch);
  trace.say("auto x" + id + " = " + own.x_text + cast_of_input(program) + ";");
  auto x = cast_input(program, own.x);
  trace.say("auto target" + id + " = " + own.target_text + ";");
  const auto& target = own.target;
  at::Tensor penalty;
  const auto penalize = [&] {
    trace.use("penalty_of");
    trace.say("auto penalty" + id + " = penalty_of(unique(net->parameters()));");
    penalty = penalty_of(unique(net->parameters()));
  };
  if (program.is("penalty", "before")) penalize();
  for (auto& layer : layers) layer->fails = throws(*this, step, "forward");
  const bool on_host = program.is("recompute", "saved_on_host");
  std::optional<save_on_host> saved;
  if (on_host) saved.emplace();
  auto cast = autocast(program);
  trace.say(
      "auto y" + id + " = " +
      (cast ? "[&] { const AutocastGuard autocast(torch::kCPU); return model->forward(x" + id +
                  "); }();"
       : on_host ? "[&] { const save_on_host saved; return " + training->call("x" + id) + "; }();"
                 : training->call("x" + id) + ";"));
  auto y = training->forward(x);
  cast.reset();
  saved.reset();
  if (program.is("penalty", "after")) penalize();
  if (throws(*this, step, "output_hook")) {
    y.register_hook([](const at::Tensor&) { throw std::runtime_error(kDeliberate); });
  }
  trace.use("loss_of");
  const bool mean = !program.is("loss", "sum");
  trace.say(
      "auto loss" + id + " = loss_of(y" + id + ", target" + id + (mean ? ", true);" : ", false);"));
  auto loss = loss_of(y, target, mean);
  if (program.is("penalty", "before|after")) {
    trace.say("loss" + id + " = loss" + id + " + penalty" + id + ";");
    loss = loss + penalty;
  }
  if (program.is("also_average", "yes")) {
    trace.say("loss" + id + " = loss" + id + " * (1 + extra.sum());");
    loss = loss * (1 + extra.sum());
  }
  if (program.is("loss", "gathered")) {
    trace.use("add_gathered");
    trace.say("loss" + id + " = add_gathered(loss" + id + ", y" + id + ", self.group);");
    loss = add_gathered(loss, y, self.group);
  }
  note(record, std::to_string(step) + " loss of batch " + id, loss);
  if (throws(*this, step, "loss_function")) loss = ThrowsInBackward::apply(loss);
  if (program.is("scaler", "overflow|one_rank") && step == 0) {
    trace.say(
        "loss" + id + " = loss" + id + " * " +
        (program.is("scaler", "overflow") ? "1e306;"
                                          : "(self.rank == self.size - 1 ? 1e306 : 1);"));
    loss = loss * (overflows(program, step, self.rank) ? 1e306 : 1);
  }
  if (scaler) {
    trace.say("loss" + id + " = scaler.scale(loss" + id + ");");
    loss = scaler->scale(loss);
  }
  losses_[batch] = loss;
}

void RankRun::backward(const Pass& pass) {
  at::Tensor loss;
  std::string text;
  for (const int batch : pass.batches) {
    loss = loss.defined() ? loss + losses_[batch] : losses_[batch];
    text += (text.empty() ? "loss" : " + loss") + std::to_string(batch);
  }
  const bool sync =
      forwards_come_first(program) && program.is("passes", "sync_in_backward") && pass.averaged;
  if (sync) {
    trace.say("model->sync_in_backward(" + text + ");");
    training->sync_in_backward(loss);
  }
  const bool retain = program.is("passes", "retain_graph");
  trace.say("(" + text + ").backward(" + (retain ? "{}, true" : "") + ");");
  loss.backward({}, retain);
  if (pass.averaged && program.is("stepping", "by_hand")) {
    trace.say("model->finalize_backward();");
    dynamic_cast<DistributedDataParallelBase&>(training->wrapper()).finalize_backward();
  }
}

void RankRun::run_passes(int step) {
  const auto passes = passes_of(program);
  if (label() == "pipeline") {
    for (const auto& pass : passes) {
      for (const int batch : pass.batches) training->run_batch(step, batch);
    }
    return;
  }
  losses_.clear();
  const auto forward_all = [&](const Pass& pass) {
    for (const int batch : pass.batches) forward(step, batch);
  };
  if (forwards_come_first(program)) {
    const bool local = program.is("passes", "sync_in_backward");
    if (local) trace.say("std::unique_ptr<NoSyncGuard> guard(new NoSyncGuard(model->no_sync()));");
    auto guard = local ? training->no_sync() : nullptr;
    for (const auto& pass : passes) forward_all(pass);
    if (local) trace.say("guard.reset();");
    guard.reset();
    for (const auto& pass : passes) backward(pass);
    return;
  }
  for (const auto& pass : passes) {
    std::shared_ptr<void> guard;
    if (!pass.averaged) {
      trace.say("std::unique_ptr<NoSyncGuard> guard(new NoSyncGuard(model->no_sync()));");
      guard = training->no_sync();
    }
    if (!pass.again) forward_all(pass);
    backward(pass);
    if (!pass.averaged) trace.say("guard.reset();");
  }
}

/// What a program does with its model between two steps, other than train it.
void RankRun::change() {
  const auto& label = program.label("change");
  if (label == "checked" || label == "rebound") {
    auto* model = dynamic_cast<DistributedDataParallelBase*>(&training->wrapper());
    if (label == "rebound") {
      std::vector<int> ranks(static_cast<size_t>(self.size));
      trace.say("std::vector<int> ranks(self.size); std::iota(ranks.begin(), ranks.end(), 0);");
      std::iota(ranks.begin(), ranks.end(), 0);
      DDP_DO(trace, model->rebind(new_group(ranks, self.group)));
      with_batches(
          [&](auto& batches) { DDP_DO(trace, batches.rebind(new_group(ranks, self.group))); });
    }
    DDP_DO(trace, model->check_replicas());
    DDP_DO(trace, TORCH_CHECK(replicas_equal(*model, self.group)));
    DDP_DO(trace, model->sync_buffers(); model->settle());
  }
  auto* model = dynamic_cast<FullyShardedBase*>(&training->wrapper());
  if (label == "summoned") {
    trace.say(
        "{ const SummonFullParams whole(*model, true); const torch::NoGradGuard no_grad; for "
        "(auto& p : unique(model->parameters())) p.mul_(0.5); }");
    const SummonFullParams whole(*model, true);
    const torch::NoGradGuard no_grad;
    for (auto& p : unique(model->parameters())) p.mul_(0.5);
  }
  if (label == "unsharded")
    DDP_DO(trace, model->unshard(); model->reshard(); model->set_reshard_after_forward(true));
}

void RankRun::between(int step) {
  const auto& label = program.label("evaluation");
  if (label == "all_ranks" || (label == "one_rank" && self.rank == 0) ||
      label == "inference_mode") {
    trace.say(
        label == "inference_mode" ? "{ const c10::InferenceMode inference;"
                                  : "{ const torch::NoGradGuard no_grad;");
    std::unique_ptr<c10::InferenceMode> inference;
    if (label == "inference_mode") inference = std::make_unique<c10::InferenceMode>();
    const c10::NoGradGuard no_grad;
    auto& model = training->wrapper();
    trace.say(
        this->label() == "pipeline"
            ? "model.eval(); model.eval(inputs_of(pp, values(7, {2, 4}))); model.train(); }"
            : "model->eval(); " + training->call("values(7, {2, 4})" + cast_of_input(program)) +
                  "; model->train(); }");
    model.eval();
    training->forward(cast_input(program, values(7, {2, 4})));
    model.train();
  }
  if (step == 0 && step + 1 < last_step()) change();
  if (has_input(program, program.number("steps") - 1, self.rank) && step + 1 < last_step())
    run_collective(*this);
}

/// Ends the printed program with the sums that its test compares.
void RankRun::say_sums() {
  trace.use("plain_name");
  trace.use("checksum");
  if (pp.group) {
    trace.use("whole_state");
    const std::string model = label() == "pipeline"            ? "model, world"
                              : program.is("units", "no_root") ? "*net, world"
                              : label() == "fsdp"              ? "*model, world"
                                                               : "*model, tp";
    trace.say(
        "Sums sums; for (const auto& item : whole_state(" + model +
        ")) if (item.value().dtype() == torch::kDouble || item.value().is_complex()) "
        "sums[plain_name(item.key())] = checksum(item.value()); return sums;");
    return;
  }
  if (label() == "fsdp" && !program.is("units", "no_root"))
    trace.say("const SummonFullParams whole(*model);");
  trace.say(
      "Sums sums; for (const auto& item : net->named_parameters()) sums[plain_name(item.key())] = "
      "checksum(item.value()); return sums;");
}

void RankRun::make_average() {
  AveragedModelOptions options;
  std::string text = "AveragedModelOptions()";
  if (program.is("average", "ema")) options.ema(0.75), text += ".ema(0.75)";
  if (program.is("average", "mean")) options.swa(), text += ".swa()";
  if (program.is("average", "warmup"))
    options.ema(0.9).warmup(true), text += ".ema(0.9).warmup(true)";
  trace.say("AveragedModel average(*model, " + text + ");");
  average = std::make_unique<AveragedModel>(training->wrapper(), options);
}

/// The parameters while the model has the averages.
void RankRun::note_average() {
  trace.say("{ const auto guard = average.apply(); }");
  const auto guard = average->apply();
  for (const auto& [name, value] : training->whole())
    note(record, "end with averages parameter " + name, value.detach().clone());
}

void RankRun::note_values(const std::string& when) {
  // Where ranks send their parts to each other, which pretended ranks do not.
  if (is_process && (pp.group || (label() == "fsdp" && program.has("precision")))) return;
  for (const auto& [name, value] : training->whole())
    note(record, when + " parameter " + name, value);
  for (const auto& item : net->named_buffers())
    note(record, when + " buffer " + plain_name(item.key()), item.value());
}

}  // namespace ddp::differential
