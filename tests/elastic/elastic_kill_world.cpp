// One rank of an elastic job in which slot 1 is killed in the backward pass of a step, or is not:
//
//   ddp_elastic_kill BACKEND adamw|zero quiet|killed
//
// Over NCCL the parameters are on this rank's GPU; scripts/gpu_check/elastic_kill.sh starts two
// ranks that share one. Both kinds of run have to end with the same bits, which the last line shows
// as a hash.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "examples/common/rank_device.h"

namespace ddp_elastic_kill {

namespace {

constexpr int64_t kSteps = 24;
constexpr int64_t kLostIn = 9;  // step
constexpr int64_t kWidth = 128;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = torch::relu(norm(in(x)));
    return out(torch::dropout(torch::relu(middle(hidden)), 0.2, is_training()));
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(16, kWidth))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(kWidth))};
  torch::nn::Linear middle{register_module("middle", torch::nn::Linear(kWidth, kWidth))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(kWidth, 4))};
};
TORCH_MODULE(Net);

uint64_t hash_of(const Net& net) {
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  uint64_t hash = 14695981039346656037ULL;
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().cpu().contiguous().flatten().view(torch::kByte);
    for (int64_t i = 0; i < bytes.numel(); ++i) {
      hash = (hash ^ bytes.const_data_ptr<uint8_t>()[i]) * 1099511628211ULL;
    }
  }
  return hash;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    ddp::DistributedDataParallel<Net>& model, bool is_sharded) {
  const torch::optim::AdamWOptions adamw(1e-3);
  if (!is_sharded) return std::make_unique<ddp::optim::AdamW>(model->parameters(), adamw);
  return std::make_unique<ddp::ZeroRedundancyOptimizer<ddp::optim::AdamW>>(model, adamw);
}

at::Tensor batch_of(int rank, int64_t step, c10::Device device) {
  const auto number = static_cast<double>(step * 2 + rank + 1);
  return torch::sin(torch::arange(1.0F, 513.0F).view({32, 16}) * number * 0.37).to(device);
}

int train(const std::string& backend, bool is_sharded, bool is_killed) {
  ddp::Elastic run(ddp::ElasticOptions().snapshot_every(6).group_options(
      ddp::ProcessGroupOptions().backend(backend).timeout(std::chrono::seconds(60))));
  const auto device = examples::rank_device(backend);
  torch::manual_seed(1);
  Net net;
  net->to(device);
  // Several buckets: the other rank has sent some when this one is killed.
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions().bucket_cap_mb(0.02));
  const auto optimizer = make_optimizer(model, is_sharded);
  run.add("model", model).add("optimizer", *optimizer);
  run.loop([&] {
    if (run.steps() >= kSteps) return false;
    const auto now = run.generation();
    const auto x = batch_of(now.rank, run.steps(), device);
    optimizer->zero_grad();
    const auto loss = (model->forward(x) - x.narrow(1, 0, 4)).square().mean();
    // Its replacement comes in a later generation.
    if (is_killed && now.slot == 1 && now.number == 1 && run.steps() == kLostIn) {
      net->in->weight.register_hook([](const at::Tensor&) { (void)std::raise(SIGKILL); });
    }
    loss.backward();
    run.step(*optimizer);
    return true;
  });
  const auto last = run.generation();
  std::printf(
      "slot %d: the end at step %lld of generation %lld, on %s, hash %016llx\n", last.slot,
      static_cast<long long>(run.steps()), static_cast<long long>(last.number),
      device.str().c_str(), static_cast<unsigned long long>(hash_of(net)));
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string optimizer = argc == 4 ? argv[2] : "", kind = argc == 4 ? argv[3] : "";
  if ((optimizer != "adamw" && optimizer != "zero") || (kind != "quiet" && kind != "killed")) {
    std::fprintf(stderr, "usage: ddp_elastic_kill BACKEND adamw|zero quiet|killed\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  torch::set_num_threads(1);
  return train(argv[1], optimizer == "zero", kind == "killed");
} catch (const std::exception& error) {
  std::fprintf(stderr, "ddp_elastic_kill: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace ddp_elastic_kill
