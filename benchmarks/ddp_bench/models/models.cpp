#include "models.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "examples/mnist/net.h"
#include "resnet18.h"
#include "transformer.h"

namespace ddp_bench {
namespace {

class Layers : public Net {
 public:
  explicit Layers(torch::nn::Sequential layers)
      : layers_(register_module("layers", std::move(layers))) {}
  at::Tensor forward(const at::Tensor& x) override { return layers_->forward(x); }

 private:
  torch::nn::Sequential layers_;
};

std::shared_ptr<Net> make_mlp() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    if (i > 0) layers->push_back(torch::nn::ReLU());
    layers->push_back(torch::nn::Linear(2048, 2048));
  }
  return std::make_shared<Layers>(layers);
}

std::shared_ptr<Net> make_small_params() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 200; ++i) {
    layers->push_back(torch::nn::Linear(32, 32));
    layers->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
  }
  return std::make_shared<Layers>(layers);
}

// The example's net, without dropout: modes that take turns would draw different masks.
class Mnist : public Net {
 public:
  Mnist() : net_(register_module("net", mnist::Net(mnist::Dropout{0, 0}))) {}
  at::Tensor forward(const at::Tensor& x) override { return net_->forward(x); }

 private:
  mnist::Net net_;
};

std::shared_ptr<Net> make_mnist() { return std::make_shared<Mnist>(); }

struct Model {
  const char* name;
  std::shared_ptr<Net> (*make)();
  std::vector<int64_t> input;
  int64_t vocabulary;  // the input is whole numbers below it; 0: normally distributed
  std::vector<int64_t> target;
  int64_t classes;  // the same for the target
};

const std::vector<Model>& models() {
  static const std::vector<Model> all = {
      {"mnist", make_mnist, {32, 1, 28, 28}, 0, {32}, 10},
      {"mlp", make_mlp, {32, 2048}, 0, {32, 2048}, 0},
      {"small_params", make_small_params, {8, 32}, 0, {8, 32}, 0},
      {"resnet18", make_resnet18, {16, 3, 32, 32}, 0, {16}, 10},
      {"transformer",
       make_transformer,
       {4, kTransformerLength},
       kTransformerVocabulary,
       {4 * kTransformerLength},
       kTransformerVocabulary}};
  return all;
}

const Model& find_model(const std::string& name) {
  const auto found = std::find_if(
      models().begin(), models().end(), [&](const Model& model) { return model.name == name; });
  TORCH_CHECK_VALUE(found != models().end(), "model: expected a known one, got ", name, ".");
  return *found;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Draws all parameters explicitly: the default initializations of LibTorch and Python draw
// different numbers. Weights of norms stay 1.
void initialize(Net& net, int64_t seed) {
  const at::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (auto& parameter : net.named_parameters()) {
    auto& values = parameter.value();
    if (values.dim() > 1) {
      const double inputs = static_cast<double>(values.numel() / values.size(0));
      values.uniform_(-1 / std::sqrt(inputs), 1 / std::sqrt(inputs), generator);
    } else if (ends_with(parameter.key(), "bias")) {
      values.zero_();
    }
  }
}

at::Tensor draw(const std::vector<int64_t>& shape, int64_t bound, const at::Generator& generator) {
  if (bound > 0) return at::randint(bound, shape, generator, at::dtype(at::kLong));
  return at::randn(shape, generator);
}

at::Tensor classification_loss(const at::Tensor& output, const at::Tensor& target) {
  return at::cross_entropy_loss(output, target);
}

// Summed over the features: the mean over all would leave gradients too small to move a weight.
at::Tensor regression_loss(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target, at::Reduction::Sum) / target.size(0);
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& model : models()) names.emplace_back(model.name);
  return names;
}

Task make_task(const std::string& name, int64_t seed, int rank, const TaskOptions& options) {
  const Model& model = find_model(name);
  Task task;
  task.net = model.make();
  initialize(*task.net, seed);
  task.net->to(options.device, options.dtype);
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + 1 + rank);
  const auto placed = [&](const at::Tensor& data) {
    return data.to(options.device, data.is_floating_point() ? options.dtype : data.scalar_type());
  };
  const auto shape = [&](std::vector<int64_t> sizes) {
    sizes.front() *= options.batch;
    return sizes;
  };
  task.input = placed(draw(shape(model.input), model.vocabulary, generator));
  task.target = placed(draw(shape(model.target), model.classes, generator));
  task.loss = model.classes > 0 ? classification_loss : regression_loss;
  return task;
}

}  // namespace ddp_bench
