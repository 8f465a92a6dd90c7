// A port of wrapper_runs.py: the same models, numbers and lines.
#include <ddp/comm_hooks.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "mpi/world.h"

namespace mpi_world {
namespace {

constexpr int kSteps = 5;

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(const std::string& kind) : kind_(kind) {
    using namespace torch::nn;
    if (kind == "convolution") {
      conv_ = register_module("conv", Conv2d(Conv2dOptions(1, 4, 3).bias(false)));
      norm_ = register_module("norm", BatchNorm2d(4));
      last_ = register_module("last", Linear(64, 3));
    } else if (kind == "sparse") {
      table_ = register_module("table", Embedding(EmbeddingOptions(20, 6).sparse(true)));
      last_ = register_module("last", Linear(18, 3));
    } else {
      first_ = register_module("first", Linear(6, 6));
      second_ = register_module("second", Linear(6, 6));
      last_ = register_module("last", Linear(6, 3));
    }
  }

  torch::Tensor forward(torch::Tensor x, bool whole) {
    if (kind_ == "convolution") {
      x = torch::relu(norm_(conv_(x))).flatten(1);
    } else if (kind_ == "sparse") {
      x = table_(x).flatten(1);
    } else {
      x = torch::relu(first_(x));
      if (kind_ == "shared") x = torch::relu(first_(x));
      if (whole) x = x + torch::relu(second_(x));
    }
    return last_(x);
  }

 private:
  const std::string kind_;
  torch::nn::Conv2d conv_{nullptr};
  torch::nn::BatchNorm2d norm_{nullptr};
  torch::nn::Embedding table_{nullptr};
  torch::nn::Linear first_{nullptr}, second_{nullptr}, last_{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor numbers(at::IntArrayRef shape, int64_t seed) {
  const auto places = torch::arange(c10::multiply_integers(shape));
  const auto whole = (places * 37 + seed * 11 + places * places) % 101 - 50;
  return (whole.to(torch::kDouble) / 50).view(shape);
}

torch::Tensor batch_of(const std::string& kind, int64_t seed) {
  if (kind == "sparse") return (torch::arange(12).view({4, 3}) * 7 + seed * 5) % 20;
  return kind == "convolution" ? numbers({4, 1, 6, 6}, seed) : numbers({4, 6}, seed);
}

void add_digest(std::vector<torch::Tensor>& values, const std::vector<torch::Tensor>& tensors) {
  if (tensors.empty()) return;
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().to(torch::kDouble).flatten());
  const auto all = torch::cat(flat);
  values.push_back(all.sum());
  values.push_back((all * torch::arange(all.numel()).to(torch::kDouble).cos()).sum());
}

void train(const std::string& kind, bool small) {
  const auto dtype = kind == "hook" ? torch::kFloat : torch::kDouble;
  Net net(kind);
  net->to(dtype);
  {
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& parameter : net->parameters()) {
      parameter.copy_(numbers(parameter.sizes(), seed++) / 2);
    }
  }
  ddp::DistributedDataParallelOptions options;
  options.find_unused_parameters(kind == "unused");
  if (small) options.bucket_cap_mb(0.0003).gradient_as_bucket_view(true);
  ddp::DistributedDataParallel<Net> model(net, options);
  if (kind == "hook") model->register_comm_hook(ddp::hooks::fp16_compress());
  torch::optim::SGD optimizer(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(kind == "sparse" ? 0 : 0.9));
  const int rank = ddp::get_rank();
  const int size = ddp::get_world_size();
  const int passes = kind == "accumulated" ? 3 : 1;
  std::vector<torch::Tensor> values;
  for (int step = 0; step < kSteps; ++step) {
    torch::Tensor loss;
    for (int pass = 0; pass < passes; ++pass) {
      const int64_t seed = (step * passes + pass) * size + rank;
      auto x = batch_of(kind, seed);
      if (kind != "sparse") x = x.to(dtype);
      const bool whole = kind != "unused" || (step + rank) % 3 == 0;
      const auto backward = [&] {
        loss = torch::mse_loss(model->forward(x, whole), numbers({4, 3}, seed + 1).to(dtype));
        loss.backward();
      };
      if (pass == passes - 1) {
        backward();
      } else {
        const auto guard = model->no_sync();
        backward();
      }
    }
    optimizer.step();
    optimizer.zero_grad();
    values.push_back(loss.detach().to(torch::kDouble));
  }
  add_digest(values, net->parameters());
  add_digest(values, net->buffers());
  const auto mine = torch::stack(values);
  std::vector<torch::Tensor> gathered;
  for (int r = 0; r < size; ++r) gathered.push_back(torch::empty_like(mine));
  ddp::all_gather(gathered, mine);
  if (rank != 0) return;
  for (int r = 0; r < size; ++r) {
    std::printf("%d ranks, %s%s, rank %d:", size, kind.c_str(), small ? ", small buckets" : "", r);
    for (int64_t i = 0; i < mine.numel(); ++i) {
      std::printf(" %.17g", gathered[static_cast<size_t>(r)][i].item<double>());
    }
    std::printf("\n");
  }
}

}  // namespace

void train_as_python(const std::string& backend) {
  ddp::init_process_group(ProcessGroupOptions().backend(backend));
  for (const auto* kind :
       {"plain", "convolution", "shared", "unused", "sparse", "accumulated", "hook"}) {
    for (const bool small : {false, true}) train(kind, small);
  }
  ddp::destroy_process_group();
}

}  // namespace mpi_world
