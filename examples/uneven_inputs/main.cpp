// Ranks with different numbers of batches, all of which are used: `ddprun -n 2 uneven_inputs`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/program.h"

namespace {

using Options = examples::DigitsOptions;

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  CLI::App app(
      "Trains on handwritten digits, of which rank 1 has twice as many as rank 0, rank 2 three "
      "times as many, and so on.",
      "uneven_inputs");
  examples::add_digits_options(app, options);
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

// Returns this rank's digits: rank r's share is r + 1 parts of all.
examples::Digits own_part(const examples::Digits& all) {
  const int64_t rank = ddp::get_rank();
  const int64_t ranks = ddp::get_world_size();
  const int64_t parts = ranks * (ranks + 1) / 2;
  const auto begin = all.size() * (rank * (rank + 1) / 2) / parts;
  const auto end = all.size() * ((rank + 1) * (rank + 2) / 2) / parts;
  return {all.pixels.slice(0, begin, end), all.labels.slice(0, begin, end)};
}

void run(const Options& options, examples::Progress& progress) {
  const auto all = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  const auto train = own_part(all);
  auto net = make_classifier(train, options);
  // Averages over samples, not over ranks: each digit counts the same, whatever rank has it.
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions().reduction(ddp::Reduction::SampleWeighted));
  torch::optim::SGD optimizer(model->parameters(), options.lr);

  const auto batches = train.pixels.split(static_cast<int64_t>(options.batch_size));
  const auto targets = train.labels.split(static_cast<int64_t>(options.batch_size));
  std::string counts;
  for (const auto& count : ddp::all_gather_strings(std::to_string(batches.size()))) {
    counts += (counts.empty() ? "" : ", ") + count;
  }
  progress.line("batches by rank: " + counts);

  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    // Ranks without batches join the all-reduces of the others, and copy their model at the end.
    const auto also = ddp::JoinOptions().optimizers({&optimizer});  // steps alike on every rank
    model->join(
        [&] {
          for (size_t i = 0; i < batches.size(); ++i) {
            optimizer.zero_grad();
            torch::cross_entropy_loss(model->forward(batches[i]), targets[i]).backward();
            optimizer.step();
          }
        },
        also);
    progress.line(c10::str(
        "epoch ", epoch + 1, "/", options.epochs, ": test accuracy ", percent_right(net, test),
        "%"));
  }
  model->check_replicas();
  progress.line("parameters: equal on all ranks");
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("uneven_inputs", argc, argv, parse_options, run);
}
