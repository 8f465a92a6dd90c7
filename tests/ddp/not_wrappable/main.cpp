// Each line of `not_wrappable`, and the last one, is a compile error, whose text says what to write
// instead.
#include <ddp/distributed_data_parallel.h>
#include <ddp/sampler.h>
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

struct Song {
  at::Tensor notes;
};
struct Songs : torch::data::datasets::Dataset<Songs, Song> {
  Song get(size_t /*index*/) override { return {}; }
  std::optional<size_t> size() const override { return 1; }
};

void not_comparable(const ddp::DistributedSampler& sampler, Songs& songs) {
  sampler.check_dataset(songs);
}
