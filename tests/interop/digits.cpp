// A line-by-line port of digits.py. FOLDER
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "examples/common/data/idx.h"

namespace ddp_interop_digits {

namespace {

constexpr int64_t kSeed = 7;
constexpr size_t kEpochs = 3;
constexpr size_t kBatch = 32;

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm(conv(x)));
    x = torch::relu(fc1(x.flatten(1)));
    return fc2(dropout(x));
  }

  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).bias(false)))};
  torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(16))};
  torch::nn::Dropout dropout{register_module("dropout", torch::nn::Dropout(0.25))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(16 * 6 * 6, 32))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(32, 10))};
};
TORCH_MODULE(Net);

struct Digits : torch::data::datasets::Dataset<Digits> {
  torch::data::Example<> get(size_t i) override {
    const auto row = static_cast<int64_t>(i);
    return {images[row], labels[row]};
  }
  std::optional<size_t> size() const override { return images.size(0); }

  torch::Tensor images, labels;
};

/// Reads the first `count` of MNIST's images.
Digits read(const std::string& folder, const std::string& split, int64_t count) {
  const auto files = examples::read_mnist(folder, split);
  Digits digits;
  digits.images = files.images.slice(0, 0, count).unsqueeze(1).to(torch::kDouble) / 255;
  digits.labels = files.labels.slice(0, 0, count);
  return digits;
}

using Parameters = std::vector<torch::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)>;

std::unique_ptr<torch::optim::Optimizer> sgd(Parameters parameters) {
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
}

std::unique_ptr<torch::optim::Optimizer> adam(Parameters parameters) {
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.003));
}

using Model = ddp::DistributedDataParallel<Net>;

/// Prints on rank 0 each step's losses, of both ranks, its loss on the test images, and its
/// buckets' bytes.
void report(
    const std::string& folder, const std::string& name, Model& model,
    const std::vector<torch::Tensor>& each) {
  const auto test = read(folder, "t10k", 100);
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto tested =
      torch::nn::functional::cross_entropy(model->module()(test.images), test.labels);
  const auto losses = torch::stack(each);
  std::vector<torch::Tensor> gathered;
  for (int r = 0; r < ddp::get_world_size(); ++r) gathered.push_back(torch::empty_like(losses));
  ddp::all_gather(gathered, losses);
  if (ddp::get_rank() != 0) return;
  for (int64_t step = 0; step < losses.size(0); ++step) {
    std::printf("%s: step %ld:", name.c_str(), static_cast<long>(step));
    for (const auto& rank : gathered) std::printf(" %.17g", rank[step].item<double>());
    std::printf("\n");
  }
  std::printf("%s: test: %.17g\n%s: buckets:", name.c_str(), tested.item<double>(), name.c_str());
  const auto parameters = model->parameters();
  for (const auto& bucket : model->stats().buckets) {
    size_t bytes = 0;
    for (const size_t p : bucket) bytes += parameters[p].nbytes();
    std::printf(" %zu", bytes);
  }
  std::printf("\n");
}

struct Case {
  bool drop_last = false;
  size_t accumulate = 1;
};

void train(
    const std::string& folder, const std::string& name, const MakeOptimizer& make_optimizer,
    const Case& options = {}) {
  torch::manual_seed(kSeed);  // the same weights on every rank
  Net net;
  net->to(torch::kDouble);
  Model model(net, ddp::DistributedDataParallelOptions().bucket_cap_mb(0.05));
  torch::manual_seed(kSeed + 1 + ddp::get_rank());  // from here on only dropout draws numbers
  const auto optimizer = make_optimizer(model->parameters());
  auto data = read(folder, "train", 501);
  ddp::DistributedSampler sampler(
      *data.size(), ddp::DistributedSamplerOptions().seed(kSeed).drop_last(options.drop_last));
  const auto loader =
      torch::data::make_data_loader(data.map(torch::data::transforms::Stack<>()), sampler, kBatch);

  std::vector<torch::Tensor> losses;
  for (size_t epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);
    size_t step = 0;
    for (const auto& batch : *loader) {
      const auto pass = [&] {
        const auto loss = torch::nn::functional::cross_entropy(model(batch.data), batch.target);
        (loss / static_cast<double>(options.accumulate)).backward();
        losses.push_back(loss.detach());
      };
      if (++step % options.accumulate != 0) {
        const auto guard = model->no_sync();
        pass();
        continue;
      }
      pass();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  report(folder, name, model, losses);
}

}  // namespace

int main(int /*argc*/, char** argv) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  train(argv[1], "sgd", sgd);
  train(argv[1], "adam, drop_last", adam, {/*drop_last=*/true});
  train(argv[1], "sgd, 2 passes a step", sgd, {/*drop_last=*/false, /*accumulate=*/2});
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_interop_digits
