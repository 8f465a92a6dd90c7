// Compares communication hooks, which send something else than the gradients: `ddprun -n 2
// comm_hook --hook power_sgd`.
#include <ddp/ddp.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "../common/command_line.h"
#include "../common/data/digits.h"
#include "../common/program.h"

namespace {

struct Options : examples::DigitsOptions {
  std::string hook = "majority";
};

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// A user's own hook: each rank sends the signs of its gradients, a byte each, and all step in the
// direction that most of them voted for (Bernstein et al., "signSGD", 2018).
Future majority(ddp::GradBucket& bucket) {
  const auto& buffer = bucket.buffer();
  std::vector<at::Tensor> votes{buffer.sign().to(torch::kInt8)};
  // Returns the future of the bucket: the hook itself does not wait.
  return ddp::all_reduce_async(votes[0])->getFuture()->then(
      [buffer, votes](c10::ivalue::Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        const torch::NoGradGuard no_grad;
        return c10::IValue(buffer.copy_(votes[0].sign()).mul_(0.02));  // about a gradient's size
      },
      c10::TensorType::get());
}

using namespace ddp::hooks;

const std::map<std::string, std::function<ddp::CommHook()>> kHooks = {
    {"all_reduce", [] { return all_reduce(); }},
    {"fp16", [] { return fp16_compress(); }},
    {"bf16", [] { return bf16_compress(); }},
    {"int8", [] { return int8_compress(); }},
    {"fp8", [] { return fp8_compress(); }},
    {"power_sgd",
     [] { return power_sgd(PowerSGDOptions().matrix_approximation_rank(2).start_iter(10)); }},
    {"power_sgd_bf16",
     [] {
       return bf16_compress_wrapper(
           power_sgd(PowerSGDOptions().matrix_approximation_rank(2).start_iter(10)));
     }},
    {"top_k", [] { return top_k(TopKOptions().ratio(0.05)); }},
    {"majority", [] { return ddp::CommHook(majority); }},
};

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help) {
  Options options;
  std::vector<std::string> names;
  for (const auto& [name, hook] : kHooks) names.push_back(name);
  CLI::App app("Trains on handwritten digits with a communication hook.", "comm_hook");
  examples::add_digits_options(app, options);
  app.add_option("--hook", options.hook, "What travels")->check(CLI::IsMember(names));
  if (!examples::parse_command_line(app, argc, argv, help)) return std::nullopt;
  return options;
}

void run(const Options& options, examples::Progress& progress) {
  const auto train = read_digits(options, "train");
  const auto test = read_digits(options, "t10k");
  auto net = make_classifier(train, options);
  ddp::DistributedDataParallel model(net);
  model->register_comm_hook(kHooks.at(options.hook)());
  torch::optim::SGD optimizer(
      model->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.5));
  ddp::DistributedSampler sampler(static_cast<size_t>(train.size()));

  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    sampler.reset();
    double loss_sum = 0;
    int64_t steps = 0;
    while (const auto indices = sampler.next(options.batch_size)) {
      const auto batch = train.at(*indices);
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(model->forward(batch.pixels), batch.labels);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>();
      ++steps;
    }
    progress.line(c10::str(
        "epoch ", epoch + 1, "/", options.epochs, ": loss ",
        ddp::average(loss_sum / static_cast<double>(steps)), ", test accuracy ",
        percent_right(net, test), "%"));
  }
  model->check_replicas();  // every rank has to end with the same parameters
  progress.line("parameters: equal on all ranks with " + options.hook);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_program("comm_hook", argc, argv, parse_options, run);
}
