// Continues from the files of state_dict_interop.py (argv[1]), compares the losses with Python's,
// and saves its own state for Python to continue from (argv[2]).
#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/error_of.h"

namespace ddp_state_dict_interop {

namespace {

namespace optim = torch::optim;
using Parameters = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const Parameters&)>;

constexpr int kSteps = 5;

template <typename Optimizer, typename Options>
MakeOptimizer maker(Options options) {
  return [=](const Parameters& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}

// Other options than Python's, so that the file's have to replace them.
std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  return {
      {"Adam", maker<optim::Adam>(optim::AdamOptions(0.5))},
      {"AdamW", maker<optim::AdamW>(optim::AdamWOptions(0.5))},
      {"SGD", maker<optim::SGD>(optim::SGDOptions(0.5))},
      {"PlainSGD", maker<optim::SGD>(optim::SGDOptions(0.5).momentum(0.9))},
      {"RMSprop", maker<optim::RMSprop>(optim::RMSpropOptions(0.5))},
      {"Adagrad", maker<optim::Adagrad>(optim::AdagradOptions(0.5))},
      {"NAdam", maker<ddp::optim::NAdam>(ddp::optim::NAdamOptions(0.5))},
      {"RAdam", maker<ddp::optim::RAdam>(ddp::optim::RAdamOptions(0.5))},
      {"Adamax", maker<ddp::optim::Adamax>(ddp::optim::AdamaxOptions(0.5))},
      {"Adadelta", maker<ddp::optim::Adadelta>(ddp::optim::AdadeltaOptions(0.5))},
      {"Muon", [](const Parameters& parameters) {
         Parameters matrices;
         for (const auto& p : parameters) {
           if (p.dim() == 2) matrices.push_back(p);
         }
         return std::make_unique<ddp::optim::Muon>(matrices, ddp::optim::MuonOptions(0.5));
       }}};
}

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(
      torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
      torch::nn::Linear(8, 1));
}

std::vector<double> train(torch::nn::Sequential& model, optim::Optimizer& optimizer, int first) {
  std::vector<double> losses;
  for (int step = first; step < first + kSteps; ++step) {
    const auto x = torch::sin(torch::arange(32.0, torch::kFloat) * (step + 1)).view({8, 4});
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(x), x.sum(1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int failures = 0;

void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << what << '\n';
  ++failures;
}

void resume(
    const std::string& name, const MakeOptimizer& make, const std::string& from,
    const std::string& to) {
  auto model = make_model();
  const auto optimizer = make(model->parameters());
  ddp::load_state_dict(*model, from + "/" + name + ".model.pt");
  ddp::load_state_dict(*optimizer, from + "/" + name + ".optimizer.pt");
  std::ifstream expected(from + "/" + name + ".losses");
  for (const double loss : train(model, *optimizer, kSteps)) {
    double python = 0;
    expected >> python;
    expect(
        std::abs(loss - python) <= 1e-6,
        name + ": loss " + std::to_string(loss) + ", in Python " + std::to_string(python));
  }
  ddp::save_state_dict(*model, to + "/" + name + ".model.pt");
  ddp::save_state_dict(*optimizer, to + "/" + name + ".optimizer.pt");
  std::ofstream losses(to + "/" + name + ".losses");
  losses.precision(9);
  for (const double loss : train(model, *optimizer, 2 * kSteps)) losses << loss << '\n';
}

void save_views(const std::string& to) {
  torch::nn::Module values;
  const auto tied = values.register_buffer("tied", torch::ones({3}));
  values.register_buffer("again", tied);
  values.register_buffer("view", torch::arange(1e6, torch::kFloat).narrow(0, 0, 10));
  values.register_buffer("transposed", torch::arange(6.0, torch::kFloat).view({2, 3}).t());
  values.register_buffer("half", torch::ones({2}, torch::kBFloat16));
  ddp::save_state_dict(values, to + "/values.pt");
}

// A tensor in three boxes, one of them with other strides, and a scalar.
void save_shards(const std::string& to) {
  const auto whole = torch::arange(24.0, torch::kFloat).view({4, 6});
  const auto box = [&](int64_t row, int64_t column, int64_t rows, int64_t columns) {
    return ddp::ShardedTensor{
        "fc.weight", {4, 6}, {row, column}, whole.narrow(0, row, rows).narrow(1, column, columns)};
  };
  ddp::init_process_group();
  ddp::Checkpointer checkpointer(to + "/shards");
  checkpointer.add_sharded("model", [&] {
    return std::vector<ddp::ShardedTensor>{
        box(0, 0, 2, 6), box(2, 0, 2, 1), box(2, 1, 2, 5), {"step", {}, {}, torch::tensor(7)}};
  });
  checkpointer.save(3);
  checkpointer.wait();
  ddp::destroy_process_group();
}

void refuse(const std::string& from) {
  const auto expect_error = [&](const std::string& file, const std::string& text) {
    auto model = make_model();
    optim::Adam optimizer(model->parameters());
    const auto of_model = ddp::testing::error_of([&] { ddp::load_state_dict(*model, file); });
    const auto of_optimizer =
        ddp::testing::error_of([&] { ddp::load_state_dict(optimizer, file); });
    const auto& error = text.find("maximize") == std::string::npos ? of_model : of_optimizer;
    expect(
        error.find(file) == 0 && error.find(text) != std::string::npos,
        file + ": expected an error about " + text + ", got: " + error);
  };
  expect_error(from + "/whole_model.pt", "got torch.nn.modules.container.Sequential");
  expect_error(from + "/legacy.pt", "expected a file of torch.save");
  expect_error(from + "/maximize.pt", "expected \"maximize\" to be false");
  expect_error(from + "/Adam.optimizer.pt", "expected a state_dict() of a module");
  torch::save(torch::ones({2}), from + "/archive.pt");
  expect_error(from + "/archive.pt", "torch::load");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    for (const auto& [name, make] : optimizers()) resume(name, make, argv[1], argv[2]);
    save_views(argv[2]);
    save_shards(argv[2]);
    refuse(argv[1]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace ddp_state_dict_interop
