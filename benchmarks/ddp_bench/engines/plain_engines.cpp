#include "plain_engines.h"

#include <utility>

#include <ATen/ATen.h>
#include <ddp/collectives.h>

namespace ddp_bench {
namespace {

class PlainEngine : public Engine {
 public:
  PlainEngine(Task task, ddp::ProcessGroup group)
      : Engine(std::move(task)), group_(std::move(group)) {}

 protected:
  const ddp::ProcessGroup& group() const { return group_; }

  // Divides first, as the reducers do.
  void average(at::Tensor& gradient) {
    gradient.div_(group_->getSize());
    ddp::all_reduce(gradient, c10d::ReduceOp::SUM, group_);
  }

 private:
  ddp::ProcessGroup group_;
};

class None : public PlainEngine {
 public:
  using PlainEngine::PlainEngine;
  Messages messages() const override { return {}; }

 protected:
  void after_backward() override {
    // One rank has no peer to wait for, and NCCL's barrier would wait for the device.
    if (group()->getSize() > 1) ddp::barrier(group());
  }
};

class Naive : public PlainEngine {
 public:
  using PlainEngine::PlainEngine;

  Messages messages() const override {
    Messages messages{{}, /*one_by_one=*/true};
    for (const auto& p : parameters()) messages.elements.push_back(p.numel());
    return messages;
  }

 protected:
  void after_backward() override {
    for (const auto& p : parameters()) average(p.mutable_grad());
  }
};

class Flat : public PlainEngine {
 public:
  Flat(Task task, ddp::ProcessGroup group) : PlainEngine(std::move(task), std::move(group)) {
    int64_t elements = 0;
    for (const auto& p : parameters()) elements += p.numel();
    all_ = at::empty({elements}, parameters().front().options().requires_grad(false));
    int64_t start = 0;
    for (const auto& p : parameters()) {
      parts_.push_back(all_.narrow(0, start, p.numel()).view(p.sizes()));
      start += p.numel();
    }
  }

  Messages messages() const override { return {{all_.numel()}}; }

 protected:
  void after_backward() override {
    const auto all_parameters = parameters();
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i].copy_(all_parameters[i].grad());
    average(all_);
    for (size_t i = 0; i < parts_.size(); ++i) all_parameters[i].mutable_grad().copy_(parts_[i]);
  }

 private:
  at::Tensor all_;
  std::vector<at::Tensor> parts_;  // views of it, one for each parameter
};

}  // namespace

std::unique_ptr<Engine> make_none(Task task, const ddp::ProcessGroup& group) {
  return std::make_unique<None>(std::move(task), group);
}

std::unique_ptr<Engine> make_naive(Task task, const ddp::ProcessGroup& group) {
  return std::make_unique<Naive>(std::move(task), group);
}

std::unique_ptr<Engine> make_flat(Task task, const ddp::ProcessGroup& group) {
  return std::make_unique<Flat>(std::move(task), group);
}

}  // namespace ddp_bench
