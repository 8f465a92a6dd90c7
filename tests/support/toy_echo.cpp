#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <ddp/backend.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/light_work.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "support/toy_device.h"

namespace ddp::testing::toy {
namespace {

/// The end of a collective on the echo's stream. Without an event it was on the CPU.
class EchoEnd final : public c10d::Work {
 public:
  explicit EchoEnd(std::shared_ptr<c10::Event> end) : end_(std::move(end)) {}
  bool isCompleted() override {
    ++Device::get().polls;
    return !end_ || end_->query();
  }

 private:
  std::shared_ptr<c10::Event> end_;
};

/// A collective on the echo's stream.
class EchoWork final : public c10d::Work, public KeepsTensors {
 public:
  explicit EchoWork(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {
    const auto device = outputs_.front().device();
    result_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(),
        device.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device});
    if (!device.is_cpu()) {
      end_ = std::make_shared<c10::Event>(at::kPrivateUse1);
      end_->record(Guard().getStream(device));
    }
    result_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return without_tensors()->isCompleted(); }
  bool isSuccess() const override { TORCH_CHECK(false, "isSuccess() is deprecated"); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (end_) end_->block(Guard().getStream(outputs_.front().device()));
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return result_; }
  c10::intrusive_ptr<c10d::Work> without_tensors() override {
    return c10::make_intrusive<EchoEnd>(end_);
  }

 private:
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<c10::Event> end_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;
};

class Echo final : public CollectiveBackend {
 public:
  using CollectiveBackend::CollectiveBackend;

  const std::string getBackendName() const override { return "echo"; }
  bool supportsCoalescing() const override { return false; }

  WorkPtr run(Collective c) override {
    return on_own_stream(c.results(), [&] {
      switch (c.kind) {
        case Kind::Broadcast:
          return;
        case Kind::AllReduce:
          for (auto& t : c.out) sum(t, c.op);
          return;
        case Kind::AllGather:
          for (const auto& out : c.outputs()) out.copy_(c.in[0].view(out.sizes()));
          return;
        case Kind::AllToAll:
          for (const auto& out : c.outputs()) {
            out.copy_(c.inputs()[static_cast<size_t>(getRank())].view(out.sizes()));
          }
          return;
        case Kind::ReduceScatter:
          c.out[0].copy_(c.inputs()[static_cast<size_t>(getRank())].view(c.out[0].sizes()));
          return sum(c.out[0], c.op);
        default:
          TORCH_CHECK(false, "echo: expected another collective");
      }
    });
  }

 private:
  void sum(at::Tensor& t, const c10d::ReduceOp& op) const {
    // All ranks have the same.
    if (op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX || op == c10d::ReduceOp::BAND)
      return;
    TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG);
    t.mul_(op == c10d::ReduceOp::SUM ? getSize() : 1);
  }
  template <typename Run>
  WorkPtr on_own_stream(const std::vector<at::Tensor>& outputs, const Run& run) const {
    const at::NoGradGuard no_grad;
    const auto device = outputs.front().device();
    std::optional<c10::StreamGuard> guard;
    if (!device.is_cpu()) {
      const auto own = stream(kEchoStream, device.index());
      c10::Event inputs(at::kPrivateUse1);
      inputs.record(Guard().getStream(device));
      inputs.block(own);
      guard.emplace(own);
      auto& toy = Device::get();
      toy.echo_busy.push_back(!toy.is_idle(Device::key_of(own)));
    }
    run();
    return c10::make_intrusive<EchoWork>(outputs);
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_echo(int rank, int size) {
  return c10::make_intrusive<Echo>(rank, size);
}

c10::intrusive_ptr<c10d::ProcessGroup> echo_group(int size) {
  [[maybe_unused]] static const bool once = [] {
    register_backend(
        "echo", BackendDescription()
                    .devices({at::kPrivateUse1})
                    .waits_on_stream(true)
                    .make([](const BackendSetup& s) { return make_echo(s.rank, s.size); }));
    return true;
  }();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, size);
  const auto echo = make_echo(0, size);
  for (const auto device : {at::kCPU, at::kPrivateUse1}) {
    group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM, echo);
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName("echo");
  return group;
}

RanksOptions over_echo() {
  [[maybe_unused]] static const bool once = [] {
    register_backend(
        "echo_of_ranks",
        BackendDescription()
            .devices({at::kCPU, at::kPrivateUse1})
            .waits_on_stream(true)
            .averages(true)
            .make([](const BackendSetup& s) { return make_echo(s.rank, s.size); }));
    return true;
  }();
  return over("echo_of_ranks");
}

}  // namespace ddp::testing::toy
