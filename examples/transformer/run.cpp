#include "run.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <ddp/collectives.h>
#include <ddp/full_state_dict.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <ddp/state_dict.h>
#include <torch/utils.h>

#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/reporting.h"
#include "groups.h"
#include "sampling.h"
#include "training.h"

namespace transformer {
namespace {

using Clock = std::chrono::steady_clock;

struct Data {
  Text text;
  Split windows;
  std::string prompt;
};

Data prepare(const Options& options, const Groups& groups) {
  if (ddp::is_main() && !options.save.empty()) examples::check_can_write("--save", options.save);
  auto text = Text::read(options.text);
  auto windows = split(text, options.shape.context);
  const auto replicas = static_cast<size_t>(groups.replicas);
  const auto share = (windows.train.size() + replicas - 1) / replicas;
  TORCH_CHECK_VALUE(
      options.batch_size <= share, "--batch-size: expected at most the ", share,
      " windows of the text that each rank has, got ", options.batch_size, ".");
  auto prompt =
      options.prompt.empty() ? text.decode(text.numbers().slice(0, 0, 1)) : options.prompt;
  (void)text.encode(prompt);  // throws now for a character that the text lacks
  return {std::move(text), std::move(windows), std::move(prompt)};
}

/// Rank 0 writes the whole weights. Collective.
void save_weights(const torch::nn::Module& model, const std::string& file) {
  const auto whole = ddp::full_state_dict(model);
  examples::on_all_ranks([&] {
    if (ddp::is_main()) ddp::save_state_dict(whole, file);
  });
}

/// Collective.
TrainedModel make_model(const Options& options, const Groups& groups, const Text& text) {
  TrainedModel model(options, groups, text.vocabulary());
  // From here on the generator is only used by dropout, which every rank draws for itself. But the
  // ranks of --tp draw alike, except within layers, where the next tp_size() seeds are theirs.
  const auto place = groups.stage * ddp::get_world_size(groups.data) + ddp::get_rank(groups.data);
  torch::manual_seed(static_cast<uint64_t>(options.seed + 1 + groups.tp_size() * place));
  return model;
}

std::string describe_ranks(const Groups& groups) {
  const int ranks = ddp::get_world_size();
  auto text = c10::str(ranks, ranks == 1 ? " rank" : " ranks");
  if (!groups.cuts()) return text;
  text += groups.pp ? c10::str(" (pp ", groups.pp_size(), ", dp ") : " (dp ";
  return c10::str(text, groups.replicas, ", cp ", groups.cp_size(), ", tp ", groups.tp_size(), ")");
}

std::string describe(const Options& options, const Text& text, TrainedModel& model) {
  const auto& groups = model.groups();
  int64_t parameters = 0;  // of what ranks cut, all
  for (const auto& layout : ddp::layouts_of(model.module())) {
    parameters += c10::multiply_integers(layout.sizes);
  }
  return c10::str(
      "training ", parameters, groups.pp ? " parameters of a stage on " : " parameters on ",
      text.size(), " characters, ", text.vocabulary(), " different ones; ", describe_ranks(groups),
      ", ", groups.replicas * options.batch_size * options.accumulate, " windows of ",
      options.shape.context, " a step");
}

/// Formats the line printed after some steps, which took so long.
std::string report(
    const Options& options, int64_t step, const Tally& trained, const Tally& held_out,
    std::chrono::duration<double> seconds) {
  char line[160];
  std::snprintf(
      line, sizeof line,
      "step %lld/%lld: loss %.5f, held out %.5f, of whose characters %s are foreseen; "
      "%.0f characters/s",
      static_cast<long long>(step), static_cast<long long>(options.steps), trained.mean_loss(),
      held_out.mean_loss(), held_out.accuracy().c_str(),
      static_cast<double>(trained.samples) / seconds.count());
  return line;
}

void report_replicas(const Options& options, const Groups& groups, examples::Progress& progress) {
  if (options.fsdp) {
    progress.line("parameters: in shards on " + describe_ranks(groups));
  } else if (groups.tp_size() * groups.pp_size() == 1) {
    examples::report_equal_replicas(progress);
  } else {
    progress.line("parameters: bitwise equal on all ranks that have the same");
  }
}

/// Collective.
void report_sample(
    const Options& options, const Data& data, TrainedModel& model, examples::Progress& progress) {
  const auto& groups = model.groups();
  model.module().eval();
  std::optional<ddp::SummonFullParams> whole;
  if (options.fsdp && !groups.pp) whole.emplace(*model.sharded());
  // All ranks that have a part of the first model; more than those where forward is collective.
  if (groups.replica == 0 || options.fsdp) {
    const auto predict_next = [&](const at::Tensor& seen) { return model.predict_next(seen); };
    progress.line("sample: " + sample(predict_next, data.text, data.prompt, options));
  }
  ddp::barrier();
}

}  // namespace

void run(const Options& options, examples::Progress& progress) {
  const auto groups = make_groups(options);
  std::optional<Data> data;
  examples::on_all_ranks([&] { data = prepare(options, groups); });
  auto model = make_model(options, groups, data->text);
  progress.line(describe(options, data->text, model));
  Training training(options, std::move(model), data->windows.train);
  training.begin(progress);

  Clock::duration in_steps{};
  while (training.steps_done() < options.steps) {
    const auto start = Clock::now();
    training.step();
    in_steps += Clock::now() - start;
    const int64_t step = training.steps_done();
    progress.step("step", step, options.steps);
    if (step % options.report_every == 0 || step == options.steps) {
      const auto trained = sum_over_ranks(training.take_tally(), groups.totals);
      const auto held_out =
          sum_over_ranks(training.evaluate(data->windows.held_out), groups.totals);
      progress.line(report(options, step, trained, held_out, std::exchange(in_steps, {})));
    }
    training.save_if_due();
  }

  training.finish();
  training.check_replicas();
  report_replicas(options, groups, progress);
  if (!options.save.empty()) save_weights(training.model().module(), options.save);
  if (options.sample > 0) report_sample(options, *data, training.model(), progress);
}

}  // namespace transformer
