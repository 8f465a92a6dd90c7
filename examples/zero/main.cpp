// Trains with an optimizer whose state is divided among the ranks: `ddprun -n 2 zero`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/program.h"

namespace {

struct Options : examples::DigitsOptions {
  int stage = 2;
  bool overlap = false;
  std::string checkpoint;
};

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  options.lr = 0.002;
  options.hidden = 512;
  CLI::App app("Trains a network on handwritten digits with a sharded AdamW.", "zero");
  examples::add_digits_options(app, options);
  app.add_option("--stage", options.stage, "1 divides the state, 2 the gradients as well")
      ->check(examples::between(1, 2));
  app.add_flag("--overlap", options.overlap, "Step within the backward pass");
  app.add_option("--checkpoint", options.checkpoint, "Folder to keep, and go on from; empty: none");
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

void run(const Options& options, examples::Progress& progress) {
  const auto train = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  auto net = make_classifier(train, options);
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
  ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      model, torch::optim::AdamWOptions(options.lr),
      ddp::ZeroOptions().stage(options.stage).overlap(options.overlap));
  ddp::DistributedSampler sampler(static_cast<size_t>(train.size()));

  // Saves the state of the whole optimizer, so that a run can continue with another number of
  // ranks.
  std::optional<ddp::Checkpointer> checkpointer;
  if (!options.checkpoint.empty()) {
    checkpointer.emplace(options.checkpoint);
    checkpointer->add("model", model).add("optimizer", optimizer);
  }
  for (int64_t epoch = checkpointer ? checkpointer->load_latest().value_or(0) : 0;
       epoch < options.epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    sampler.reset();
    double loss_sum = 0;
    int64_t steps = 0;
    while (const auto indices = sampler.next(options.batch_size)) {
      const auto batch = train.at(*indices);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(model->forward(batch.pixels), batch.labels);
      loss.backward();
      if (!options.overlap) ddp::clip_grad_norm_(optimizer, 1.0);
      optimizer.step();
      loss_sum += loss.item<double>();
      ++steps;
    }
    if (checkpointer) checkpointer->save(epoch + 1);
    progress.line(c10::str(
        "epoch ", epoch + 1, "/", options.epochs, ": loss ",
        ddp::average(loss_sum / static_cast<double>(steps)), ", test accuracy ",
        percent_right(net, test), "%"));
  }
  if (checkpointer) checkpointer->wait();
  model->check_replicas();
  int64_t bytes = 0;
  for (const auto& p : net->parameters()) bytes += static_cast<int64_t>(p.nbytes());
  progress.line(c10::str(
      "parameters: ", bytes, " bytes; AdamW's state: ", 2 * bytes, " bytes, of which rank 0 has ",
      optimizer.local_state_bytes()));
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("zero", argc, argv, parse_options, run);
}
