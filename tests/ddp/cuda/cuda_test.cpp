// One GPU, one rank: NCCL, and Gloo with CUDA tensors. Several ranks in one process would share
// autograd's only thread of that GPU, and deadlock on it.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include <iostream>

#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {

TEST_CASE("a module on a GPU trains as its copy does without a wrapper", "[cuda][ddp]") {
  if (!torch::cuda::is_available()) {
    std::cout << "skipped: no CUDA device\n";
    return;
  }
  const std::string backend = GENERATE("nccl", "gloo");
  const bool as_views = GENERATE(false, true);
  CAPTURE(backend, as_views);
  const auto options = testing::over(backend);
  const auto pairs =
      testing::run_ranks<std::vector<at::Tensor>>(1, options, [&](const testing::Rank& self) {
        const c10::Device device(c10::kCUDA, 0);
        const auto train = [&](bool wrapped) {
          torch::manual_seed(1);
          torch::nn::Sequential net(
              torch::nn::Linear(6, 30), torch::nn::BatchNorm1d(30), torch::nn::Linear(30, 3));
          net->to(device);
          DistributedDataParallel model(
              net, DistributedDataParallelOptions()
                       .process_group(self.group)
                       .device_ids({device})
                       .bucket_cap_mb(1e-4)
                       .gradient_as_bucket_view(as_views));
          torch::optim::SGD optimizer(net->parameters(), 0.1);
          for (int step = 0; step < 5; ++step) {
            optimizer.zero_grad();
            const auto x = torch::randn({8, 6});  // on the CPU: the wrapper moves it
            const auto y = wrapped ? model->forward(x) : net->forward(x.to(device));
            y.pow(2).mean().backward();
            optimizer.step();
          }
          return testing::flattened(net->parameters()).cpu();
        };
        return std::vector<at::Tensor>{train(true), train(false)};
      });
  CHECK(torch::equal(pairs[0][0], pairs[0][1]));
}

}  // namespace ddp
