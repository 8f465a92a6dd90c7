// Each line of `not_wrappable` is a compile error, whose text says what to write instead.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
struct Named : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
struct WithoutForward : torch::nn::Module {};

void not_wrappable() {
  Net net;
  ddp::DistributedDataParallel plain(net);
  ddp::DistributedDataParallel pointer(&net);
  ddp::DistributedDataParallel unique(std::make_unique<Net>());
  ddp::DistributedDataParallel<Named> named(std::make_shared<Named>());
  ddp::DistributedDataParallel any(torch::nn::AnyModule{});
  ddp::DistributedDataParallel without_forward(std::make_shared<WithoutForward>());
  without_forward->forward();
}
