// A rank that trains for some steps, of a real job or of a pretended one, by the axes of its model:
// pretend_world dp|zero|fsdp|tp|pp|3d|messages|all|beyond|fails [STEPS [FOLDER]]
//
// messages  between ranks 2 and 5
// all       1,024 ranks as 8 x 8 x 16, with what a program has beside its model; FOLDER: for a
//           checkpoint, which must stay away
// beyond    whole states of a layer that is cut, and what a pretended rank refuses, each with its
//           error
// fails     by an exception of its own, after a collective
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>
#include <unistd.h>

#include <ddp/ddp.h>
#include <ddp/full_state_dict.h>

#include "support/error_of.h"

namespace pretend_world {

namespace {

constexpr int64_t kWidth = 128;
constexpr int64_t kRows = 64;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const ddp::ProcessGroup& tp)
      : up(register_module(
            "up", ddp::ColumnParallelLinear(
                      ddp::ColumnParallelLinearOptions(kWidth, 4 * kWidth).process_group(tp)))),
        down(register_module(
            "down", ddp::RowParallelLinear(
                        ddp::RowParallelLinearOptions(4 * kWidth, kWidth).process_group(tp)))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(torch::gelu(up->forward(x))); }

  ddp::ColumnParallelLinear up;
  ddp::RowParallelLinear down;
};
TORCH_MODULE(Mlp);
using MlpUnit = ddp::FullyShardedDataParallel<Mlp>;

/// Layers whose parameters are cut over an axis, each a unit.
struct StageImpl : torch::nn::Module {
  StageImpl(const ddp::ProcessGroup& tp, const ddp::ProcessGroup& dp, int count) {
    for (int i = 0; i < count; ++i) {
      const auto options = ddp::FullyShardedOptions().process_group(dp);
      layers.push_back(register_module("layer" + std::to_string(i), MlpUnit(Mlp(tp), options)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }

  std::vector<MlpUnit> layers;
};
TORCH_MODULE(Stage);

torch::nn::Sequential plain_layers(int count) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

at::Tensor square_loss(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

/// \param step  makes a loss and its gradients, and steps.
void repeat(int64_t steps, const std::function<void(const at::Tensor&, const at::Tensor&)>& step) {
  torch::manual_seed(ddp::get_rank());
  for (int64_t i = 0; i < steps; ++i) {
    step(torch::randn({kRows, kWidth}), torch::randn({kRows, kWidth}));
  }
}

void train_replicas(int64_t steps) {
  torch::manual_seed(1);
  ddp::DistributedDataParallel model(plain_layers(6));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    optimizer.step();
  });
}

void train_with_zero(int64_t steps) {
  torch::manual_seed(1);
  ddp::DistributedDataParallel model(
      plain_layers(6), ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true));
  ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      model, torch::optim::AdamWOptions(1e-3), ddp::ZeroOptions().stage(2));
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    ddp::clip_grad_norm_(optimizer, 1.0);
    optimizer.step();
  });
}

void train_sharded(int64_t steps) {
  torch::manual_seed(1);
  const auto mesh = ddp::init_device_mesh({ddp::get_world_size(), 1}, {"dp", "tp"});
  ddp::FullyShardedDataParallel model(
      Stage(mesh.group("tp"), mesh.group("dp"), 4),
      ddp::FullyShardedOptions().process_group(mesh.group("dp")));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    optimizer.step();
  });
}

void train_parts(int64_t steps) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) model->push_back(Mlp(ddp::default_group()));
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x), y).backward();
    optimizer.step();
  });
}

void train_pipeline(int64_t steps, const ddp::ProcessGroup& pp, const torch::nn::Sequential& net) {
  ddp::PipelineStage stage(
      net, square_loss, ddp::PipelineOptions().process_group(pp).microbatches(4));
  torch::optim::AdamW optimizer(stage.parameters(), 1e-3);
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    std::vector<at::Tensor> inputs;
    if (ddp::get_rank(pp) == 0) inputs.push_back(x);
    stage.step(inputs, y);
    optimizer.step();
  });
}

using Model = ddp::FullyShardedDataParallel<Stage>;

/// \param beside  runs after each step.
void train_grid(
    int64_t steps, const ddp::DeviceMesh& mesh,
    const std::function<void(Model&, torch::optim::AdamW&, int64_t)>& beside = {}) {
  torch::manual_seed(1);
  Model model(
      Stage(mesh.group("tp"), mesh.group("dp"), 2),
      ddp::FullyShardedOptions().process_group(mesh.group("dp")));
  ddp::PipelineStage pipeline(
      model, square_loss, ddp::PipelineOptions().process_group(mesh.group("pp")).microbatches(4));
  torch::optim::AdamW optimizer(pipeline.parameters(), 1e-3);
  int64_t done = 0;
  repeat(steps, [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    std::vector<at::Tensor> inputs;
    if (mesh.rank("pp") == 0) inputs.push_back(x);
    pipeline.step(inputs, y);
    ddp::clip_grad_norm_(pipeline, 1.0, 2.0, {mesh.group("pp")});
    optimizer.step();
    if (beside) beside(model, optimizer, ++done);
  });
}

void expect(bool holds, const char* what) { TORCH_CHECK(holds, "expected ", what); }

void train_with_all(int64_t steps, const std::string& folder) {
  const int rank = ddp::get_rank(), size = ddp::get_world_size();
  expect(size == 1024, "1,024 ranks");
  const auto mesh = ddp::init_device_mesh({8, 8, 16}, {"pp", "dp", "tp"});
  expect(mesh.rank("tp") == rank % 16 && mesh.rank("dp") == rank / 16 % 8, "places of a mesh");
  expect(ddp::get_world_size(mesh.flatten({"dp", "tp"})) == 128, "a group of two axes");
  ddp::DistributedSampler sampler(
      100, ddp::DistributedSamplerOptions().num_replicas(8).rank(mesh.rank("dp")));
  expect(ddp::sum(1.0) == size && ddp::average(3.0) == 3.0, "metrics of equal ranks");
  expect(ddp::all_gather_strings("x").size() == static_cast<size_t>(size), "a text of each rank");
  auto part = torch::zeros({2});
  auto whole = torch::arange(2.0 * size);
  ddp::reduce_scatter_tensor(part, whole);
  expect(part[1].item<double>() == (2.0 * rank + 1) * size, "this rank's part, once for each rank");
  ddp::Checkpointer checkpoints(folder);
  bool is_added = false;
  train_grid(steps, mesh, [&](Model& model, torch::optim::AdamW& optimizer, int64_t step) {
    if (!is_added) checkpoints.add("model", model).add("optimizer", optimizer);
    is_added = true;
    checkpoints.save(step);
    if (step < steps) return;
    expect(checkpoints.steps().empty() && !checkpoints.load_latest(), "no checkpoint");
    const auto error = ddp::testing::error_of<c10::Error>([&] { checkpoints.load(step); });
    expect(error.find("saves and reads no files") != std::string::npos, "an error of load()");
  });
  expect(::access(folder.c_str(), F_OK) != 0, "no folder");
}

void try_what_is_refused() {
  const auto text_of = [](const std::function<void()>& body) {
    std::printf("%s\n", ddp::testing::error_of<c10::Error>(body).c_str());
  };
  Mlp cut(ddp::default_group());
  const auto whole = ddp::full_state_dict(*cut, ddp::get_rank());
  const auto rows = 4 * kWidth / ddp::get_world_size(), first = rows * ddp::get_rank();
  expect(whole["up.weight"].size(0) == 4 * kWidth, "the whole weight");
  const auto own = whole["up.weight"].narrow(0, first, rows);
  expect(own.equal(cut->up->weight), "this rank's part in its place");
  ddp::load_full_state_dict(*cut, whole);
  expect(own.equal(cut->up->weight), "the same after it was loaded");
  text_of([&] { ddp::load_full_state_dict(*cut, torch::OrderedDict<std::string, at::Tensor>()); });
  text_of([] { ddp::split_group(ddp::get_rank() % 2); });
  auto tensor = torch::zeros({2});
  ddp::send(tensor, (ddp::get_rank() + 1) % ddp::get_world_size());  // it is dropped
  text_of([&] { ddp::recv(tensor, (ddp::get_rank() + 1) % ddp::get_world_size()); });
}

/// Between ranks 2 and 5, while others do not exist; over two groups of the same ranks.
void send_to_each_other() {
  for (int round = 0; round < 2; ++round) {
    const auto all = ddp::default_group();
    const auto others = ddp::new_group({2, 3, 4, 5}, all);
    const int rank = ddp::get_rank();
    auto in_others = torch::full({100000}, 1.0 + round), in_all = torch::full({3}, 10.0 + rank);
    if (rank == 2) {
      ddp::send(in_others, 3, 0, others);
      ddp::send(in_all, 5, 0, all);
    } else {
      const auto later = ddp::recv_async(in_all, 2, 0, all);  // of the same tag, in another group
      in_others.zero_();
      ddp::recv(in_others, 0, 0, others);
      later->wait();
      expect(in_others[99999].item<double>() == 1.0 + round, "what rank 2 sends in one group");
      expect(in_all[2].item<double>() == 12, "what it sends in the other one");
    }
    const auto pair = ddp::new_group({2, 5}, all);  // all are there
    auto sum = torch::full({2}, 1.0 * rank);
    ddp::all_reduce(sum, c10d::ReduceOp::AVG, pair);
    expect(sum[1].item<double>() == 3.5, "the average of ranks 2 and 5");
    ddp::destroy_process_group();
    ddp::init_process_group();
  }
}

void run(const std::string& axes, int64_t steps, const std::string& folder) {
  if (axes == "dp") return train_replicas(steps);
  if (axes == "zero") return train_with_zero(steps);
  if (axes == "fsdp") return train_sharded(steps);
  if (axes == "tp") return train_parts(steps);
  if (axes == "pp") return train_pipeline(steps, ddp::default_group(), plain_layers(3));
  if (axes == "3d") {
    return train_grid(steps, ddp::init_device_mesh({2, 2, 2}, {"pp", "dp", "tp"}));
  }
  if (axes == "messages") return send_to_each_other();
  if (axes == "fails") {
    ddp::barrier();
    throw std::runtime_error("the program's own failure");
  }
  if (axes == "all") return train_with_all(steps, folder);
  try_what_is_refused();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    ddp::init_process_group();
    run(args.at(0), args.size() > 1 ? std::stoll(args[1]) : 4, args.size() > 2 ? args[2] : "");
    ddp::destroy_process_group();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace pretend_world
