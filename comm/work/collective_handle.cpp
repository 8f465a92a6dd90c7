#include "work/collective_handle.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/ranges.h>

namespace ddp {

CollectiveHandle::CollectiveHandle(StartedCall call, std::optional<CallWatch> watch)
    : c10d::Work(-1, call.parts.front()->retrieveOpType()),
      call_(std::make_shared<Call>(std::move(call))),
      watch_(std::move(watch)) {}

bool CollectiveHandle::isCompleted() {
  const auto& parts = call_->parts;
  if (call_->is_plain()) return parts.front()->isCompleted();
  const auto has_failed = [](const auto& part) { return part->isCompleted() && part->exception(); };
  if (any_of(parts, has_failed)) return true;
  const bool done = all_of(parts, [](const auto& part) { return part->isCompleted(); });
  if (done && !exception()) synchronize();
  return done;
}

// Not of the parts' isSuccess(): NCCL's throws.
bool CollectiveHandle::isSuccess() const {
  return all_of(call_->parts, [](const auto& part) { return part->isCompleted(); }) && !exception();
}

std::exception_ptr CollectiveHandle::exception() const {
  for (const auto& part : call_->parts) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> CollectiveHandle::result() {
  return call_->is_plain() ? call_->parts.front()->result() : call_->outputs;
}

void CollectiveHandle::synchronize() { call_->synchronize(); }

void CollectiveHandle::blockCurrentStream() {
  for (const auto& part : call_->parts) part->blockCurrentStream();
  call_->finish_once();
}

bool CollectiveHandle::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& part : call_->parts) {
    log_wait(part.get());
    if (watch_ && timeout == kNoTimeout) {
      watch_part(*part);
    } else {
      all = part->wait(timeout) && all;
    }
  }
  if (all) call_->finish_once();
  return all;
}

void CollectiveHandle::watch_part(c10d::Work& part) const {
  const auto& [monitor, where, on_stream, peers, _] = *watch_;
  on_stream ? monitor->wait_on_stream(part, where) : monitor->wait(part, where, peers);
}

void CollectiveHandle::abort() {
  for (const auto& part : call_->parts) part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveHandle::getFutureResult() {
  return call_->is_plain() ? call_->parts.front()->getFutureResult()
                           : c10d::Work::getFutureResult();
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveHandle::getFuture() {
  const auto& parts = call_->parts;
  if (call_->is_plain()) return parts.front()->getFuture();
  const auto type = c10::ListType::ofTensors();
  if (parts.size() == 1) {
    const auto finish = [call = call_](c10::ivalue::Future& part) {
      if (part.hasError()) std::rethrow_exception(part.exception_ptr());
      call->finish_once();
      return c10::IValue(call->outputs);
    };
    return parts.front()->getFuture()->then(finish, type);
  }
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::ofTensors()));
  for (const auto& part : parts) futures.push_back(part->getFuture());
  // collectAll() knows no devices: so the streams wait for each part here, and the result's future
  // makes those who use it wait for the last step.
  auto whole = c10::make_intrusive<c10::ivalue::Future>(type, call_->devices());
  c10::collectAll(futures)->addCallback([call = call_, whole](c10::ivalue::Future& all) {
    try {
      if (all.hasError()) std::rethrow_exception(all.exception_ptr());
      call->synchronize();
      whole->markCompleted(c10::IValue(call->outputs));
    } catch (...) {
      whole->setError(std::current_exception());
    }
  });
  return whole;
}

void CollectiveHandle::Call::synchronize() {
  for (const auto& part : parts) part->synchronize();
  finish_once();
}

void CollectiveHandle::Call::finish_once() {
  if (!finish) return;
  std::call_once(finished, [&] {
    at::NoGradGuard no_grad;
    finish();
    for (const auto& buffer : buffers) record_use(buffer);
    buffers.clear();
    if (outputs.empty() || outputs.front().is_cpu()) return;
    finished_on_device.emplace(outputs.front().device().type());
    finished_on_device->record(current_stream_of(outputs.front().device()));
  });
  if (finished_on_device) finished_on_device->block(current_stream_of(outputs.front().device()));
}

std::vector<c10::Device> CollectiveHandle::Call::devices() const {
  if (outputs.empty() || outputs.front().is_cpu()) return {};
  return {outputs.front().device()};
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
