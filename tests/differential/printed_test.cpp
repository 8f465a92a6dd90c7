// clang-format off
// seed=0 clip=2 graph=find_unused layer0=linear layer1=sync_batch_norm layer2=residual optimizer=adamw passes=accumulate reduction=SampleWeighted reload=same
#include <cmath>
#include <unistd.h>

#include <ddp/ddp.h>
#include <ddp/fully_sharded.h>
#include <ddp/functional.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using Sums = std::map<std::string, double>;

const TemporaryFolder checkpoints;

inline at::Tensor values(int64_t seed, at::IntArrayRef sizes) {
  auto result = torch::empty(sizes, torch::kDouble);
  double* data = result.data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    data[i] = std::sin(static_cast<double>(seed % 9973) * 1.7 + static_cast<double>(i + 1) * 2.3);
  }
  return result;
};

struct Layer : torch::nn::Module {
  virtual at::Tensor forward(at::Tensor x) = 0;
  virtual void use_clones() {} bool used = true, fails = false;
};

struct Net : Layer {
  void add(const std::string& name, const std::shared_ptr<Layer>& layer) {
    register_module(name, layer);
    calls.push_back([layer](at::Tensor x) { return layer->forward(x); });
  }
  at::Tensor forward(at::Tensor x) override {
    for (const auto& call : calls) x = call(x);
    return x;
  }
  std::vector<std::function<at::Tensor(at::Tensor)>> calls;
};

struct Linear : Layer {
  at::Tensor forward(at::Tensor x) override {
    return linear(x);
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
};

struct SyncedBatchNorm : Layer {
  explicit SyncedBatchNorm(const ProcessGroup& group) : norm(register_module("norm", SyncBatchNorm1d(SyncBatchNormOptions(4).process_group(group)))) {} at::Tensor forward(at::Tensor x) override {
    return norm(x);
  }
  SyncBatchNorm1d norm;
};

struct Residual : Layer {
  at::Tensor forward(at::Tensor x) override {
    return x + torch::tanh(linear(x));
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
};

inline void set_values(torch::nn::Module& module, int64_t offset) {
  const torch::NoGradGuard no_grad;
  int64_t seed = offset;
  for (auto& item : module.named_parameters()) {
    auto& parameter = item.value();
    seed += 17;
    auto drawn = values(seed, parameter.is_complex() ? at::view_as_real(parameter).sizes() : parameter.sizes());
    parameter.copy_(parameter.is_complex() ? at::view_as_complex(drawn) : drawn);
  }
};

inline std::vector<at::Tensor> unique(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& p : parameters) {
    const auto same = [&](const at::Tensor& other) {
      return other.is_same(p);
    };
    if (std::none_of(result.begin(), result.end(), same)) result.push_back(p);
  }
  return result;
};

inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& target, bool mean) {
  const auto sum = (y - target).pow(2).sum();
  return mean ? sum / static_cast<double>(std::max<int64_t>(1, y.size(0))) : sum;
};

inline std::string plain_name(std::string name) {
  for (const std::string part : {"module.", "layers.", "pair0.", "pair1.", "pair2.", "chunk0.", "chunk1."}) {
    for (size_t at = name.find(part); at != std::string::npos; at = name.find(part)) name.erase(at, part.size());
  }
  return name;
};

inline double checksum(const at::Tensor& t) {
  const auto real = (t.is_complex() ? at::view_as_real(t.detach()) : t.detach()).to(torch::kDouble).flatten();
  return (real * (torch::arange(real.numel(), torch::kDouble) + 1)).sum().item<double>();
};

Sums train0(Rank self) {
  auto net = std::make_shared<Net>();
  net->add("a", std::make_shared<Linear>());
  net->add("b", std::make_shared<SyncedBatchNorm>(self.group));
  net->add("c", std::make_shared<Residual>());
  net->to(torch::kDouble);
  set_values(*net, 1 + self.rank);
  DistributedDataParallelOptions options;
  options.process_group(self.group);
  options.reduction(Reduction::SampleWeighted);
  options.find_unused_parameters(true);
  DistributedDataParallel model(std::shared_ptr<Layer>(net), options);
  const auto trained = unique(net->parameters());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(trained);
  auto optimizer_pointer = std::make_shared<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01).eps(1e-3));
  auto& optimizer = *optimizer_pointer;
  Checkpointer checkpointer(checkpoints.path(), CheckpointerOptions().process_group(self.group));
  checkpointer.add("model", model).add("optimizer", optimizer);
  // step 0
  {
    zero_grad(optimizer);
    std::unique_ptr<NoSyncGuard> guard(new NoSyncGuard(model->no_sync()));
    auto x0 = values(1000 + self.rank, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto target0 = values(1000 + self.rank + 5, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto y0 = model->forward(x0);
    auto loss0 = loss_of(y0, target0, true);
    (loss0).backward();
    guard.reset();
    auto x1 = values(1010 + self.rank, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto target1 = values(1010 + self.rank + 5, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto y1 = model->forward(x1);
    auto loss1 = loss_of(y1, target1, true);
    (loss1).backward();
    clip_grad_norm_(optimizer, 0.5);
    optimizer.step();
  }
  checkpointer.save(1);
  checkpointer.wait();
  return {};
}

Sums train1(Rank self) {
  auto net = std::make_shared<Net>();
  net->add("a", std::make_shared<Linear>());
  net->add("b", std::make_shared<SyncedBatchNorm>(self.group));
  net->add("c", std::make_shared<Residual>());
  net->to(torch::kDouble);
  set_values(*net, 1 + self.rank);
  DistributedDataParallelOptions options;
  options.process_group(self.group);
  options.reduction(Reduction::SampleWeighted);
  options.find_unused_parameters(true);
  DistributedDataParallel model(std::shared_ptr<Layer>(net), options);
  const auto trained = unique(net->parameters());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(trained);
  auto optimizer_pointer = std::make_shared<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01).eps(1e-3));
  auto& optimizer = *optimizer_pointer;
  Checkpointer checkpointer(checkpoints.path(), CheckpointerOptions().process_group(self.group));
  checkpointer.add("model", model).add("optimizer", optimizer);
  checkpointer.load_latest();
  // step 1
  {
    zero_grad(optimizer);
    std::unique_ptr<NoSyncGuard> guard(new NoSyncGuard(model->no_sync()));
    auto x0 = values(1100 + self.rank, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto target0 = values(1100 + self.rank + 5, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto y0 = model->forward(x0);
    auto loss0 = loss_of(y0, target0, true);
    (loss0).backward();
    guard.reset();
    auto x1 = values(1110 + self.rank, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto target1 = values(1110 + self.rank + 5, {std::vector<int64_t>{3, 3}[self.rank], 4});
    auto y1 = model->forward(x1);
    auto loss1 = loss_of(y1, target1, true);
    (loss1).backward();
    clip_grad_norm_(optimizer, 0.5);
    optimizer.step();
  }
  Sums sums;
  for (const auto& item : net->named_parameters()) sums[plain_name(item.key())] = checksum(item.value());
  return sums;

}

TEST_CASE("differential: seed=0 clip=2 graph=find_unused layer0=linear layer1=sync_batch_norm layer2=residual optimizer=adamw passes=accumulate reduction=SampleWeighted reload=same") {
  RanksOptions options;
  options.backend = "shm";
  run_ranks<Sums>(2, train0, options);
  const auto sums = run_ranks<Sums>(2, train1, options);
  // One process has:
  const Sums expected{
      {"a.linear.bias", -1.8028995741},
      {"a.linear.weight", -7.5488770426},
      {"b.norm.bias", 1.290557243},
      {"b.norm.weight", 0.40133738137},
      {"c.linear.bias", 2.6391163543},
      {"c.linear.weight", 2.6936176391},};
  for (const auto& own : sums) {
    for (const auto& [name, value] : expected) {
      CAPTURE(name);
      CHECK(std::abs(own.at(name) - value) <= 1e-9 * (1 + std::abs(value)));
    }
  }
}

}  // namespace
