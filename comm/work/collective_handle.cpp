#include "work/collective_handle.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/ranges.h>

namespace ddp {

CollectiveHandle::CollectiveHandle(StartedCall call, std::optional<CallWatch> watch)
    : c10d::Work(-1, call.parts.front()->retrieveOpType()),
      call_(std::move(call)),
      watch_(std::move(watch)) {}

bool CollectiveHandle::isCompleted() {
  const auto& parts = call_.parts;
  if (is_plain()) return parts.front()->isCompleted();
  const auto has_failed = [](const auto& part) { return part->isCompleted() && part->exception(); };
  if (any_of(parts, has_failed)) return true;
  const bool done = all_of(parts, [](const auto& part) { return part->isCompleted(); });
  if (done && !exception()) synchronize();
  return done;
}

// Not of the parts' isSuccess(): NCCL's throws.
bool CollectiveHandle::isSuccess() const {
  return all_of(call_.parts, [](const auto& part) { return part->isCompleted(); }) && !exception();
}

std::exception_ptr CollectiveHandle::exception() const {
  for (const auto& part : call_.parts) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> CollectiveHandle::result() {
  return is_plain() ? call_.parts.front()->result() : call_.outputs;
}

void CollectiveHandle::synchronize() {
  for (const auto& part : call_.parts) part->synchronize();
  finish_once();
}

void CollectiveHandle::blockCurrentStream() {
  for (const auto& part : call_.parts) part->blockCurrentStream();
  finish_once();
}

bool CollectiveHandle::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& part : call_.parts) {
    if (watch_ && timeout == kNoTimeout) {
      watch_part(*part);
    } else {
      all = part->wait(timeout) && all;
    }
  }
  if (all) finish_once();
  return all;
}

void CollectiveHandle::watch_part(c10d::Work& part) const {
  const auto& [monitor, where, on_stream, peers, _] = *watch_;
  on_stream ? monitor->wait_on_stream(part, where) : monitor->wait(part, where, peers);
}

void CollectiveHandle::abort() {
  for (const auto& part : call_.parts) part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveHandle::getFutureResult() {
  return is_plain() ? call_.parts.front()->getFutureResult() : c10d::Work::getFutureResult();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveHandle::getFuture() {
  const auto& parts = call_.parts;
  if (is_plain()) return parts.front()->getFuture();
  auto self = c10::intrusive_ptr<CollectiveHandle>::unsafe_reclaim_from_nonowning(this);
  const auto type = c10::ListType::ofTensors();
  if (parts.size() == 1) {
    const auto finish = [self](c10::ivalue::Future& part) {
      if (part.hasError()) std::rethrow_exception(part.exception_ptr());
      self->finish_once();
      return c10::IValue(self->call_.outputs);
    };
    return parts.front()->getFuture()->then(finish, type);
  }
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::ofTensors()));
  for (const auto& part : parts) futures.push_back(part->getFuture());
  // collectAll() knows no devices: so the streams wait for each part here, and the result's future
  // makes those who use it wait for the last step.
  auto whole = c10::make_intrusive<c10::ivalue::Future>(type, devices());
  c10::collectAll(futures)->addCallback([self, whole](c10::ivalue::Future& all) {
    try {
      if (all.hasError()) std::rethrow_exception(all.exception_ptr());
      self->synchronize();
      whole->markCompleted(c10::IValue(self->call_.outputs));
    } catch (...) {
      whole->setError(std::current_exception());
    }
  });
  return whole;
}

std::vector<c10::Device> CollectiveHandle::devices() const {
  const auto& outputs = call_.outputs;
  if (outputs.empty() || outputs.front().is_cpu()) return {};
  return {outputs.front().device()};
}

void CollectiveHandle::finish_once() {
  if (!call_.finish) return;
  const auto& outputs = call_.outputs;
  std::call_once(finished_, [&] {
    at::NoGradGuard no_grad;
    call_.finish();
    for (const auto& buffer : call_.buffers) record_use(buffer);
    call_.buffers.clear();
    if (outputs.empty() || outputs.front().is_cpu()) return;
    finished_on_device_.emplace(outputs.front().device().type());
    finished_on_device_->record(current_stream_of(outputs.front().device()));
  });
  if (finished_on_device_) finished_on_device_->block(current_stream_of(outputs.front().device()));
}

WorkPtr handle_of(StartedCall call) {
  if (call.parts.size() == 1 && !call.finish) return std::move(call.parts.front());
  return c10::make_intrusive<CollectiveHandle>(std::move(call));
}

WorkPtr combine_works(std::vector<WorkPtr> parts, std::vector<at::Tensor> outputs) {
  return c10::make_intrusive<CollectiveHandle>(
      StartedCall{std::move(parts), {}, std::move(outputs)});
}

}  // namespace ddp
