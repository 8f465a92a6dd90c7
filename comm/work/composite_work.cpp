#include "work/composite_work.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/current_stream.h>

namespace ddp {

CompositeWork::CompositeWork(
    std::vector<WorkPtr> parts, std::function<void()> finish, std::vector<at::Tensor> outputs,
    std::vector<at::Tensor> buffers)
    : c10d::Work(-1, parts.front()->retrieveOpType()),
      parts_(std::move(parts)),
      finish_(std::move(finish)),
      outputs_(std::move(outputs)),
      buffers_(std::move(buffers)) {}

bool CompositeWork::isCompleted() {
  const auto has_failed = [](const auto& part) { return part->isCompleted() && part->exception(); };
  if (std::any_of(parts_.begin(), parts_.end(), has_failed)) return true;
  const bool done = std::all_of(
      parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
  if (done && !exception()) synchronize();
  return done;
}

// Not of the parts' isSuccess(): NCCL's throws.
bool CompositeWork::isSuccess() const {
  const auto is_over = [](const auto& part) { return part->isCompleted(); };
  return std::all_of(parts_.begin(), parts_.end(), is_over) && !exception();
}

std::exception_ptr CompositeWork::exception() const {
  for (const auto& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> CompositeWork::result() { return outputs_; }

void CompositeWork::synchronize() {
  for (const auto& part : parts_) part->synchronize();
  finish_once();
}

bool CompositeWork::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& part : parts_) all = part->wait(timeout) && all;
  if (all) finish_once();
  return all;
}

void CompositeWork::abort() {
  for (const auto& part : parts_) part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CompositeWork::getFuture() {
  auto self = c10::intrusive_ptr<CompositeWork>::unsafe_reclaim_from_nonowning(this);
  const auto type = c10::ListType::ofTensors();
  if (parts_.size() == 1) {
    const auto finish = [self](c10::ivalue::Future& part) {
      if (part.hasError()) std::rethrow_exception(part.exception_ptr());
      self->finish_once();
      return c10::IValue(self->outputs_);
    };
    return parts_.front()->getFuture()->then(finish, type);
  }
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::ofTensors()));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  // collectAll() knows no devices: so the streams wait for each part here, and the result's future
  // makes those who use it wait for the last step.
  auto whole = c10::make_intrusive<c10::ivalue::Future>(type, devices());
  c10::collectAll(futures)->addCallback([self, whole](c10::ivalue::Future& parts) {
    try {
      if (parts.hasError()) std::rethrow_exception(parts.exception_ptr());
      self->synchronize();
      whole->markCompleted(c10::IValue(self->outputs_));
    } catch (...) {
      whole->setError(std::current_exception());
    }
  });
  return whole;
}

std::vector<c10::Device> CompositeWork::devices() const {
  if (outputs_.empty() || outputs_.front().is_cpu()) return {};
  return {outputs_.front().device()};
}

void CompositeWork::finish_once() {
  std::call_once(finished_, [this] {
    at::NoGradGuard no_grad;
    finish_();
    for (const auto& buffer : buffers_) record_use(buffer);
    buffers_.clear();
    if (outputs_.empty() || outputs_.front().is_cpu()) return;
    finished_on_device_.emplace(outputs_.front().device().type());
    finished_on_device_->record(current_stream_of(outputs_.front().device()));
  });
  if (finished_on_device_) {
    finished_on_device_->block(current_stream_of(outputs_.front().device()));
  }
}

WorkPtr combine_works(std::vector<WorkPtr> parts, std::vector<at::Tensor> outputs) {
  const auto no_last_step = [] {};
  return c10::make_intrusive<CompositeWork>(std::move(parts), no_last_step, std::move(outputs));
}

}  // namespace ddp
