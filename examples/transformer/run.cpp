#include "run.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/collectives.h>
#include <ddp/full_state_dict.h>
#include <ddp/process_group.h>
#include <ddp/state_dict.h>
#include <torch/utils.h>

#include "../common/default_group.h"
#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/program.h"
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

Data read_data(const Options& options, const Groups& groups) {
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

/// Collective.
Data prepare(const Options& options, const Groups& groups) {
  std::optional<Data> data;
  examples::on_all_ranks([&] { data = read_data(options, groups); });
  return std::move(*data);
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
  const auto place = groups.totals ? ddp::get_rank(groups.totals) : groups.replica;
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

/// Collective with --pp.
std::string describe(const Options& options, const Text& text, TrainedModel& model) {
  const auto& groups = model.groups();
  return c10::str(
      "training ", model.numel(), " parameters on ", text.size(), " characters, ",
      text.vocabulary(), " different ones; ", describe_ranks(groups), ", ",
      groups.replicas * options.batch_size * options.accumulate, " windows of ",
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
  } else if (options.regions.are_used()) {
    progress.line("parameters: bitwise equal within each region");
  } else if (groups.tp_size() * groups.pp_size() == 1) {
    examples::report_equal_replicas(progress);
  } else {
    progress.line("parameters: bitwise equal on all ranks that have the same");
  }
}

void report_exchanges(const ddp::DiLoCo& diloco, examples::Progress& progress) {
  const auto stats = diloco.stats();
  char line[160];
  std::snprintf(
      line, sizeof line,
      "regions: %zu, which have exchanged %lld times; this one has sent %.1f MB, and waited %.1f s",
      stats.regions.size(), static_cast<long long>(diloco.round()),
      static_cast<double>(stats.bytes_sent) / 1e6, stats.seconds_waited);
  progress.line(line);
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

/// Prints how the steps since the last line went, which took so long. Collective.
void report_steps(
    const Options& options, const Data& data, Training& training, Clock::duration in_steps,
    examples::Progress& progress) {
  const auto& totals = training.model().groups().totals;
  const auto group = totals ? ddp::GroupArg(totals) : ddp::GroupArg();
  const auto trained = sum_over_ranks(training.take_tally(), group);
  const auto held_out = sum_over_ranks(training.evaluate(data.windows.held_out), group);
  progress.line(report(options, training.steps_done(), trained, held_out, in_steps));
}

/// Collective.
void report_end(
    const Options& options, const Data& data, Training& training, examples::Progress& progress) {
  training.check_replicas();
  report_replicas(options, training.model().groups(), progress);
  if (const auto* diloco = training.diloco()) report_exchanges(*diloco, progress);
  if (!options.save.empty()) save_weights(training.model().module(), options.save);
  if (options.sample > 0) report_sample(options, data, training.model(), progress);
}

bool is_report_due(const Options& options, int64_t step) {
  return step % options.report_every == 0 || step == options.steps;
}

void run_on_these_ranks(const Options& options) {
  const examples::DefaultGroup default_group(options.backend);
  examples::LeaveOnSignal leaving(options.leave_on_signal);
  auto progress = examples::progress_of_rank();
  const auto groups = make_groups(options);
  const auto data = prepare(options, groups);
  auto model = make_model(options, groups, data.text);
  progress.line(describe(options, data.text, model));
  Training training(options, std::move(model), data.windows.train);
  training.begin(progress);

  Clock::duration in_steps{};
  while (training.steps_done() < options.steps) {
    const auto start = Clock::now();
    training.step();
    in_steps += Clock::now() - start;
    const int64_t step = training.steps_done();
    progress.step("step", step, options.steps);
    if (is_report_due(options, step)) {
      report_steps(options, data, training, std::exchange(in_steps, {}), progress);
    }
    training.save_if_due();
    training.leave_if_told(leaving, progress);
  }
  training.finish();
  report_end(options, data, training, progress);
}

void report_change(const ddp::ElasticGeneration& now, examples::Progress& progress) {
  progress.restyle(examples::Progress::choose(now.rank, STDOUT_FILENO));
  if (now.number < 2) return;
  const auto why = now.why.empty() ? "" : " (" + now.why + ")";  // known to ranks that were there
  progress.line(c10::str(
      "generation ", now.number, ": ", now.size, " ranks from step ", now.steps, " on", why));
}

/// Each step is a turn, each line, and the end: any of them is repeated where a rank is lost.
void run_on_changing_ranks(const Options& options) {
  ddp::Elastic run(ddp::ElasticOptions()
                       .seed(options.seed)
                       .group(ddp::ProcessGroupOptions().backend(options.backend)));
  auto progress = examples::progress_of_rank();
  const auto groups = with_whole_models(run.generation().size, run.generation().rank);
  const auto data = prepare(options, groups);
  auto model = make_model(options, groups, data.text);
  if (!run.is_newcomer()) progress.line(describe(options, data.text, model));
  Training training(options, std::move(model), data.windows.train);

  int64_t reported = 0;
  bool is_over = false;
  Clock::duration in_steps{};
  training.add_to(run);
  run.add("reported", reported).add("is_over", is_over);
  run.on_change([&](const ddp::ElasticGeneration& now) {
    training.follow(now);
    report_change(now, progress);
  });
  run.loop([&] {
    if (is_over) return false;
    const int64_t step = run.steps();
    if (step > reported && is_report_due(options, step)) {
      report_steps(options, data, training, std::exchange(in_steps, {}), progress);
      reported = step;
    } else if (step < options.steps) {
      const auto start = Clock::now();
      training.backward();
      run.step([&] { training.apply(); });
      in_steps += Clock::now() - start;
      progress.step("step", run.steps(), options.steps);
    } else {
      report_end(options, data, training, progress);
      is_over = true;
    }
    return true;
  });
}

}  // namespace

void run(const Options& options) {
  options.elastic ? run_on_changing_ranks(options) : run_on_these_ranks(options);
}

}  // namespace transformer
