// While autograd runs: gradients become ready, and their buckets leave; the last when it is done.
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/stream_capture.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "engine.h"

namespace ddp {

// A backward pass through one of this reducer's forwards begins.
void Reducer::Engine::on_output() {
  if (!hooks_.accumulates()) return;
  monitor_->check();
  begin_backward();
}

void Reducer::Engine::on_gradient(size_t parameter, bool defined) {
  if (defined) usage_->mark_used(parameter);
  const auto phase = phase_.load(std::memory_order_acquire);
  // After a reduced pass, gradients that do not come from this reducer's outputs are none of its
  // business: another wrapper's, or the bare module's.
  const bool further = phase == Phase::Done && !usage_->outputs_are_known();
  if (phase != Phase::Armed && phase != Phase::Reducing && !further) {
    if (phase != Phase::Local) note_bare_gradient(parameter);
    return;
  }
  begin_backward();
  using Arrival = BackwardPass::Arrival;
  switch (pass_->count(parameter)) {
    case Arrival::Early:
      return;
    case Arrival::Extra:
      for (auto& problem : usage_->check_extra(parameter, *pass_)) {
        status_.report(std::move(problem));
      }
      return;
    case Arrival::Ready:
      break;
  }
  if (observers_.tuner) observers_.tuner->ready(parameter);
  schedule_.note_ready(parameter);
  const auto b = pass_->slots()[parameter].bucket;
  if (!pass_->complete_one(b)) return;
  observers_.tell([&](PassObserver& o) { o.bucket_ready(b); });
  launch_ready_buckets();
}

void Reducer::Engine::note_bare_gradient(size_t parameter) {
  if (group_->getSize() == 1) return;
  if (bare_.note(parameter, buckets_.parameters()[parameter].tensor)) tell_bare_step(parameter);
}

void Reducer::Engine::tell_bare_step(size_t parameter) const {
  TORCH_WARN(
      "DistributedDataParallel: expected gradients of passes that the wrapper's forward began, got "
      "an optimizer step on those of others (",
      buckets_.parameters()[parameter].name, " has one) on ", monitor_->rank_text(),
      ". They are not averaged, so the ranks' models drift apart. Call the wrapped model, not "
      "module(), in what is trained, and let a penalty's backward follow its forward.");
}

void Reducer::Engine::begin_backward() {
  if (!hooks_.watch_end(pass_->number())) return;
  // No forward pass came in between: of two forwards and two backwards, say.
  if (schedule_.rebuild_is_due()) rebuild_buckets();
  phase_ = Phase::Reducing;
  pass_->captured = is_capturing(device());
  if (pass_->captured) observers_.recorder.leave_out();  // its times would be those of the capture
  if (const auto used = bare_.used(buckets_.parameters())) tell_bare_step(*used);
  pass_->served = buckets_.serve_gradients();
  observers_.tell([](PassObserver& o) { o.begin_backward(); });
  if (companion_) {
    pass_->waits = companion_->must_wait();
    if (pass_->waits) return;
    companion_->begin(pass_->terms);
  }
  // Buckets of nothing but unused parameters wait for no gradient; others may have been ready while
  // the terms were not.
  if (!pass_->counts_only && !observers_.tuner) launch_until_served();
}

// All but the last: that one carries this rank's status, which is known when autograd is done. Its
// last gradient comes about then anyway.
//
// Takes no lock: a thread that finds another one launching leaves it a request, and that one looks
// again before it goes. The first one is the one that begins the pass.
void Reducer::Engine::launch_ready_buckets() {
  if (observers_.tuner) return;  // which measures both apart
  if (pass_->launch_requests.fetch_add(1) == 0) launch_until_served();
}

void Reducer::Engine::launch_until_served() {
  auto& next = pass_->next_bucket;
  uint32_t served = 1;
  do {
    while (next + 1 < buckets_.size() && pass_->bucket(next).pending == 0) launch(next++);
  } while (!pass_->launch_requests.compare_exchange_strong(served, 0));
}

void Reducer::Engine::on_backward_done() {
  if (phase_ != Phase::Reducing) return;
  const at::NoGradGuard no_grad;
  // Not so at the end of a backward pass inside another one (reentrant autograd), whose own
  // gradients are still to come.
  if (!pass_->is_complete() && torch::autograd::get_current_node()) return;
  pass_->served.reset();
  if (std::exchange(pass_->waits, false)) begin_at_end();
  for (auto& problem : usage_->check(*pass_)) status_.report(std::move(problem));
  launch_rest();
  finish_pass();
}

void Reducer::Engine::begin_at_end() {
  try {
    companion_->begin(pass_->terms);
  } catch (...) {
    on_backward_failed(pass_->number(), std::current_exception());
    throw;
  }
}

void Reducer::Engine::on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept {
  if (phase_ != Phase::Reducing || pass != pass_->number()) return;
  phase_ = Phase::Local;
  pass_->served.reset();
  try {
    monitor_->fail(ddp::str(
        "backward threw on ", monitor_->rank_text(), ", after ", pass_->next_bucket.load(), " of ",
        buckets_.size(), " buckets were sent", cause ? ": " + text_of(cause) : ""));
  } catch (const std::exception&) {
    // Out of memory: the others will find this rank gone, or wait for their timeout.
  }
}

void Reducer::Engine::join_backward(const PassTerms& terms) {
  monitor_->check();
  const at::NoGradGuard no_grad;
  if (schedule_.rebuild_is_due()) rebuild_buckets();
  begin_pass(pass_->number());
  pass_->joined = true;
  pass_->forwards = 1;
  pass_->terms = terms;
  phase_ = Phase::Reducing;
  launch_rest();
  finish_pass();
}

// Whether this rank had a backward pass of its own does not matter from here on.
void Reducer::Engine::launch_rest() {
  observers_.tell([](PassObserver& o) { o.autograd_done(); });
  auto& next = pass_->next_bucket;
  while (next + 1 < buckets_.size()) launch(next++);
  // Between the same two buckets on every rank, and when the data is final: a checkpoint inside the
  // backward pass runs parts of forward again.
  if (companion_) {
    monitor_->abort_on_error(
        [&] { return ddp::str("sending the buffers of rank ", pass_->terms.source); },
        [&] { companion_->start(pass_->terms.source); });
  }
  launch(next++);
}

void Reducer::Engine::launch(size_t b) {
  RECORD_FUNCTION(ddp::str("ddp::launch_bucket ", b), c10::ArrayRef<const c10::IValue>());
  const at::NoGradGuard no_grad;
  const bool is_last = b + 1 == buckets_.size();
  monitor_->abort_on_error(
      [&] { return ddp::str("starting bucket ", b); },
      [&] {
        if (const auto work = reduction_->in_the_way()) {
          follow(work, [b] {
            return ddp::str("reducing bucket ", b - 1, " to make room for the next");
          });
          if (b > 0) pass_->bucket(b - 1).in_flight.work.reset();  // Gloo's keep a copy of it
        }
        pack(b);
        if (is_last && !status_.travels_alone()) send_status();
        const auto& bucket = buckets_[b];
        observers_.tell([&](PassObserver& o) { o.launching(b, bucket.bytes()); });
        auto& in_flight = pass_->bucket(b).in_flight;
        in_flight = reduction_->start(bucket, b, is_last, pass_->terms.scale);
        observers_.tell([&](PassObserver& o) { o.launched(b, in_flight, buckets_.on_cpu()); });
        if (is_last && status_.travels_alone()) send_status();
      });
}

void Reducer::Engine::pack(size_t b) {
  auto& bucket = buckets_[b];
  const bool looks_at_usage = usage_->tracks_usage() || pass_->joined;
  const auto* used = looks_at_usage ? &usage_->used() : nullptr;
  const auto unused = pass_->joined ? Bucket::Unused::Zero : Bucket::Unused::Remember;
  const auto scale = reduction_->scale_of(bucket, pass_->terms.scale);
  // On a device a copy is a launch, for each gradient one. On the CPU it is cheap, and what is seen
  // and measured of one rank holds for several.
  const bool returns = !buckets_.on_cpu() && reduction_->returns_as_packed() && scale == 1;
  if (returns && !pass_->joined && bucket.leave_alone(used)) return;
  observers_.tell([](PassObserver& o) { o.begin_pack(); });
  auto misfits = bucket.pack(scale, used, unused);
  observers_.tell([](PassObserver& o) { o.end_pack(); });
  for (auto& misfit : misfits) {
    status_.report(
        {"expected gradients of the kind of their bucket, got others",
         "Convert them in a hook on the parameter, or the parameter.",
         {bucket.names()[misfit.slot]},
         std::move(misfit.difference)});
  }
}

void Reducer::Engine::send_status() {
  if (pass_->captured && group_->getSize() > 1) {
    pass_->problems = status_.write_nothing();
    return;
  }
  const auto forwards = pass_->joined ? std::nullopt : std::optional<uint64_t>(pass_->forwards);
  pass_->problems = status_.write(forwards, usage_->used());
  if (status_.travels_alone()) pass_->status_work = status_.send(*group_);
}

}  // namespace ddp
