#include "run.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <ddp/state_dict.h>
#include <torch/utils.h>

#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/rank_device.h"
#include "../common/reporting.h"
#include "groups.h"
#include "sampling.h"
#include "training.h"
#include "whole_weights.h"

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

void load_weights(const LanguageModel& net, const std::string& file) {
  LanguageModel whole(net->vocabulary, net->shape);
  ddp::load_state_dict(*whole, file);
  cut_weights(whole, net);
}

/// Rank 0 writes the first model's weights. Collective.
void save_weights(const LanguageModel& net, const std::string& file) {
  std::optional<LanguageModel> whole;
  if (net->groups.replica == 0) whole = join_weights(net);
  examples::on_all_ranks([&] {
    if (ddp::is_main()) ddp::save_state_dict(**whole, file);
  });
}

/// Collective where layers are cut.
LanguageModel make_model(const Options& options, const Groups& groups, const Text& text) {
  const auto seed = static_cast<uint64_t>(options.seed);
  torch::manual_seed(seed);
  LanguageModel net(text.vocabulary(), options.shape, groups);
  examples::on_all_ranks([&] {
    if (!options.load.empty()) load_weights(net, options.load);
    net->to(examples::rank_device(options.backend));
  });
  // From here on the generator is only used by dropout, which every rank draws for itself. But the
  // ranks of --tp draw alike, except within layers, where the next tp_size() seeds are theirs.
  const auto first = static_cast<uint64_t>(groups.tp_size() * ddp::get_rank(groups.data));
  torch::manual_seed(seed + 1 + first);
  return net;
}

std::string describe_ranks(const Groups& groups) {
  const int ranks = ddp::get_world_size();
  auto text = c10::str(ranks, ranks == 1 ? " rank" : " ranks");
  if (!groups.cuts()) return text;
  return c10::str(
      text, " (dp ", groups.replicas, ", cp ", groups.cp_size(), ", tp ", groups.tp_size(), ")");
}

std::string describe(const Options& options, const Text& text, LanguageModel& net) {
  const auto& groups = net->groups;
  int64_t parameters = 0;
  for (const auto& p : net->parameters()) parameters += p.numel();
  return c10::str(
      "training ", parameters, groups.tp_size() == 1 ? " parameters on " : " parameters a rank on ",
      text.size(), " characters, ", text.vocabulary(), " different ones; ", describe_ranks(groups),
      ", ", groups.replicas * options.batch_size * options.accumulate, " windows of ",
      options.shape.context, " a step");
}

/// Formats the line printed after some steps, which began at `start`.
std::string report(
    const Options& options, int64_t step, const Tally& trained, const Tally& held_out,
    Clock::time_point start) {
  const std::chrono::duration<double> seconds = Clock::now() - start;
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

}  // namespace

void run(const Options& options, examples::Progress& progress) {
  const auto groups = make_groups(options);
  std::optional<Data> data;
  examples::on_all_ranks([&] { data = prepare(options, groups); });
  auto net = make_model(options, groups, data->text);
  progress.line(describe(options, data->text, net));
  Training training(options, net, data->windows.train);
  training.begin(progress);

  auto start = Clock::now();
  while (training.steps_done() < options.steps) {
    training.step();
    const int64_t step = training.steps_done();
    progress.step("step", step, options.steps);
    if (step % options.report_every == 0 || step == options.steps) {
      const auto trained = sum_over_ranks(training.take_tally(), groups.data);
      const auto held_out = sum_over_ranks(training.evaluate(data->windows.held_out), groups.data);
      progress.line(report(options, step, trained, held_out, start));
      start = Clock::now();
    }
    training.save_if_due();
  }

  training.finish();
  training.check_replicas();
  if (groups.tp_size() == 1) {
    examples::report_equal_replicas(progress);
  } else {
    progress.line("parameters: bitwise equal on all ranks that have the same");
  }
  if (!options.save.empty()) save_weights(net, options.save);
  if (options.sample == 0) return;
  // All ranks that have a part of the first model.
  if (groups.replica == 0) {
    progress.line("sample: " + sample(net, data->text, data->prompt, options));
  }
  ddp::barrier();
}

}  // namespace transformer
