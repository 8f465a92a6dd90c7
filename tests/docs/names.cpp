#include "names.h"

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "blocks.h"

namespace {

/// An object that is made anew for each block, and cannot be assigned.
template <typename T>
class Slot {
 public:
  ~Slot() { drop(); }
  T& get() { return *std::launder(reinterpret_cast<T*>(memory_)); }
  template <typename... Args>
  void make(Args&&... args) {
    drop();
    new (memory_) T(std::forward<Args>(args)...);
    is_made_ = true;
  }
  void drop() {
    if (std::exchange(is_made_, false)) get().~T();
  }

 private:
  alignas(T) std::byte memory_[sizeof(T)];
  bool is_made_ = false;
};

Slot<torch::optim::SGD> sgd;
Slot<torch::optim::Adam> generator_adam, judge_adam;
Slot<ddp::DeviceMesh> mesh_of_ranks;
Slot<ddp::PipelineStage<Stage>> stage_of_rank;
Slot<ddp::Elastic> elastic;  // never made: no block that uses it runs

int number_of(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

}  // namespace

NetImpl::NetImpl(int64_t inputs, int64_t outputs) : inputs(inputs), outputs(outputs) { reset(); }
void NetImpl::reset() { head = register_module("head", torch::nn::Linear(inputs, outputs)); }
at::Tensor NetImpl::forward(const at::Tensor& x) {
  const auto rows = x.flatten(1);  // of any width: blocks name no sizes
  const auto missing = inputs - rows.size(1);
  const auto output = head->forward(torch::constant_pad_nd(rows, {0, missing}));
  return outputs == 10 ? torch::log_softmax(output, 1) : output;
}

torch::data::Example<> Digits::get(size_t index) {
  return {
      torch::full({1, 28, 28}, static_cast<double>(index % 10) / 10),
      torch::tensor(static_cast<int64_t>(index % 10))};
}

BlockImpl::BlockImpl(int64_t width)
    : weight(register_parameter("weight", torch::randn({width, 64}))) {}
at::Tensor BlockImpl::forward(at::Tensor x) {
  return x.flatten(1).narrow(1, 0, 1) * weight.mean(1);
}

StageImpl::StageImpl(int64_t, int64_t, const ddp::ProcessGroup&)
    : embedding(register_module("embedding", torch::nn::Embedding(8, 8))) {}
at::Tensor StageImpl::forward(at::Tensor x) { return x * embedding->weight.mean(); }

Data dataset = Digits().map(torch::data::transforms::Stack<>());
std::unique_ptr<torch::data::StatelessDataLoader<Data, ddp::DistributedSampler>> loader;
ddp::DistributedDataParallel<Net> model{nullptr};
torch::optim::SGD& optimizer = sgd.get();
torch::Device device = torch::kCPU;
int64_t epoch = 0;
ddp::Elastic& run = elastic.get();
at::Tensor a, b, x, y, batch_loss, grad_norm;
double correct = 3, samples = 4;
Data open_or_download(const char*) { return dataset; }

ddp::ProcessGroup tp, cp;
torch::nn::LayerNorm norm{nullptr};
ddp::FullyShardedDataParallel<Net> sharded{nullptr};

Stage layers{nullptr};
ddp::PipelineStage<Stage>& pipeline = stage_of_rank.get();
ddp::DeviceMesh& mesh = mesh_of_ranks.get();
int rank = 0, ranks = 1;
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

Net generator_net{nullptr}, judge_net{nullptr};
torch::optim::Adam &generator_optimizer = generator_adam.get(), &judge_optimizer = judge_adam.get();
at::Tensor real, fake;
at::Tensor loss(const at::Tensor& output, double target) { return (output - target).pow(2).mean(); }

void drop_names() {
  batch_loss = at::Tensor();
  for (auto* slot : {&generator_adam, &judge_adam}) slot->drop();
  sgd.drop();
  stage_of_rank.drop();
  loader.reset();
  model = ddp::DistributedDataParallel<Net>(nullptr);
  sharded = ddp::FullyShardedDataParallel<Net>(nullptr);
  layers = Stage(nullptr);
  mesh_of_ranks.drop();
  tp = cp = ddp::ProcessGroup();
}

void make_names(bool has_group) {
  drop_names();
  rank = number_of("RANK", 0);
  ranks = number_of("WORLD_SIZE", 1);
  torch::manual_seed(1 + rank);
  epoch = 0;
  x = torch::rand({10, 1, 28, 28});
  y = torch::rand({10, 10}).softmax(1);
  a = torch::rand({10, 784}).set_requires_grad(true);
  b = torch::rand({10, 784});
  grad_norm = torch::ones({1});
  const auto share = ddp::DistributedSamplerOptions().num_replicas(ranks).rank(rank);
  loader = torch::data::make_data_loader(
      dataset, ddp::DistributedSampler(*dataset.size(), share), /*options=*/32);
  norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}));
  generator_net = Net(784, 784);
  judge_net = Net(784, 1);
  real = torch::rand({10, 784});
  fake = torch::rand({10, 784});
  if (!has_group) return;
  model = ddp::DistributedDataParallel<Net>(Net());
  sgd.make(model->parameters(), 0.1);
  generator_adam.make(generator_net->parameters(), torch::optim::AdamOptions());
  judge_adam.make(judge_net->parameters(), torch::optim::AdamOptions());
  batch_loss = model->module()->forward(x).mean();
  sharded = ddp::FullyShardedDataParallel<Net>(Net());
  tp = cp = ddp::default_group();
  mesh_of_ranks.make(ddp::init_device_mesh({ranks, 1, 1}, {"pp", "dp", "tp"}));
  layers = Stage(rank, ranks);
  stage_of_rank.make(
      layers, rank, ranks, loss_of, ddp::PipelineOptions().process_group(mesh.group("pp")));
}

// The other projects' classes: no block that makes one runs.
namespace c10d {
ProcessGroupXCCL::ProcessGroupXCCL(const c10::intrusive_ptr<Store>&, int rank, int size)
    : Backend(rank, size) {}
ProcessGroupUCC::ProcessGroupUCC(
    const c10::intrusive_ptr<Store>&, int rank, int size, std::chrono::duration<float>)
    : Backend(rank, size) {}
}  // namespace c10d
c10::intrusive_ptr<c10d::Backend>
oneccl_bindings_for_pytorch::ProcessGroupCCL::createProcessGroupCCL(
    const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds) {
  return {};
}
