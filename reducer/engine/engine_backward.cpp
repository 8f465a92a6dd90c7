// While autograd runs: launches each bucket whose gradients are ready, the last after autograd.
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "engine/engine.h"

namespace ddp {

// A backward pass through one of this reducer's forwards begins.
void Reducer::Engine::on_output() {
  if (!hooks_.accumulates()) return;
  monitor_->check();
  begin_backward();
}

bool Reducer::Engine::belongs_to_reduced_pass() const {
  switch (phase_.load(std::memory_order_acquire)) {
    case Phase::Armed:
    case Phase::Reducing:
      return true;
    case Phase::Selected:
      // A parameter of no module may get its gradient before the pass reaches an output.
      return usage_->runs_through_outputs();
    case Phase::Done:
    case Phase::Sent:
      // The reducer ignores gradients that do not come through outputs of its own forwards: another
      // wrapper made them, or the module without its wrapper.
      return !usage_->outputs_are_known() || usage_->runs_through_outputs();
    case Phase::Idle:
    case Phase::Local:
      break;
  }
  return false;
}

void Reducer::Engine::before_gradient(size_t parameter) {
  if (averaged_.may_hold(parameter)) set_average_aside(parameter, belongs_to_reduced_pass());
}

void Reducer::Engine::set_average_aside(size_t parameter, bool is_reduced) {
  if (averaged_.before_gradient(parameter, is_reduced)) return;
  status_.report(
      {"expected .grad as a backward pass inside no_sync() left it, or zeros, got one that was "
       "changed in place",
       "After an averaged pass, change .grad (clipping, unscaling) before such passes, or after "
       "the next averaged one.",
       {buckets_.parameters()[parameter].name},
       ""});
}

void Reducer::Engine::on_gradient(size_t parameter, bool defined) {
  if (defined) usage_->mark_used(parameter);
  if (!belongs_to_reduced_pass()) {
    averaged_.after_local_gradient(parameter);
    const auto phase = phase_.load(std::memory_order_acquire);
    if (phase == Phase::Idle || phase == Phase::Done) note_unaveraged_gradient(parameter);
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
  if (buckets_.spans_devices()) pass_->bucket(b).stream = current_stream_of(buckets_[b].device());
  if (!pass_->complete_one(b)) return;
  observers_.notify([&](PassObserver& o) { o.bucket_ready(b); });
  launch_ready_buckets();
}

void Reducer::Engine::note_unaveraged_gradient(size_t parameter) {
  if (group_->getSize() == 1) return;
  if (unaveraged_.note(parameter, buckets_.parameters()[parameter].tensor))
    warn_unaveraged_step(parameter);
}

void Reducer::Engine::warn_unaveraged_step(size_t parameter) const {
  TORCH_WARN(
      "DistributedDataParallel: expected gradients of passes that the wrapper's forward began, got "
      "an optimizer step on those of others (",
      buckets_.parameters()[parameter].name, " has one) on ", monitor_->rank_text(),
      ". They are not averaged, so the ranks' models drift apart. ",
      buckets_.parameters()[parameter].is_outside
          ? "Add the loss of this tensor to one that the wrapped model's forward began, and run "
            "one backward pass."
          : "Call the wrapped model, not module(), in what is trained, and let a penalty's "
            "backward follow its forward.");
}

void Reducer::Engine::begin_backward() {
  check_finalized();
  if (!hooks_.watch_end(pass_->number())) return;
  if (monitor_->job_has_others()) early_failures_.reached();
  // Due where no forward pass came since the ranks agreed, as with two forwards and two backwards.
  if (schedule_.rebuild_is_due()) {
    companion_ ? companion_->with_own_dtypes([this] { rebuild_buckets(); }) : rebuild_buckets();
  }
  phase_ = Phase::Reducing;
  pass_->captured = is_capturing(device());
  if (pass_->captured) observers_.skip_step();  // its times would be those of the capture
  if (const auto used = unaveraged_.find_used(buckets_.parameters())) warn_unaveraged_step(*used);
  pass_->gradient_memory_scope = buckets_.use_gradient_memory();
  observers_.notify([](PassObserver& o) { o.begin_backward(); });
  if (companion_) {
    pass_->waits_for_autograd = companion_->must_wait();
    if (pass_->waits_for_autograd) return;
    begin_companion();
  }
  // Buckets with only unused parameters get no gradient that would launch them; others may have
  // become ready before the terms were known.
  if (!pass_->counts_only && !observers_.tuner) drain_launch_queue();
}

// Launches all but the last bucket: that one carries this rank's status, which is known after
// autograd is done. Its last gradient is ready at about that time anyway.
//
// Takes no lock: a thread that finds another one launching adds a request to the counter, and the
// other one checks the counter before it stops. The thread that begins the pass launches first.
void Reducer::Engine::launch_ready_buckets() {
  if (observers_.tuner) return;  // it measures computation and communication one after the other
  if (pass_->launch_requests.fetch_add(1) == 0) drain_launch_queue();
}

void Reducer::Engine::drain_launch_queue() {
  auto& next = pass_->next_bucket;
  uint32_t handled = 1;
  do {
    while (next + 1 < buckets_.size() && pass_->bucket(next).pending == 0) {
      const size_t b = next++;
      const c10::OptionalStreamGuard guard(pass_->bucket(b).stream);
      launch(b);
    }
  } while (!pass_->launch_requests.compare_exchange_strong(handled, 0));
}

void Reducer::Engine::on_backward_done() {
  if (phase_ != Phase::Reducing) return;
  const at::NoGradGuard no_grad;
  // A backward pass inside another one (reentrant autograd) ended; the outer one still has
  // gradients to make.
  if (!pass_->is_complete() && torch::autograd::get_current_node()) return;
  send_rest();
  finalizes_by_hand_ ? phase_.store(Phase::Sent) : finish_pass();
}

// All gradients of the pass are there.
void Reducer::Engine::send_rest() {
  if (companion_) companion_->autograd_done();
  pass_->gradient_memory_scope.reset();
  if (std::exchange(pass_->waits_for_autograd, false)) begin_after_autograd();
  for (auto& problem : usage_->check(*pass_)) status_.report(std::move(problem));
  launch_rest();
}

/// The other ranks' part of it is no time of this rank's own.
void Reducer::Engine::begin_companion() {
  observers_.timer.begin_wait();
  companion_->begin(pass_->terms);
  observers_.timer.end_wait();
}

void Reducer::Engine::begin_after_autograd() {
  try {
    begin_companion();
  } catch (...) {
    on_backward_failed(pass_->number(), std::current_exception());
    throw;
  }
}

// A pass that was to be reduced threw before it began here: nothing is sent yet, as where a forward
// pass throws.
void Reducer::Engine::on_early_failure(const std::exception_ptr& cause) noexcept {
  if (phase_ != Phase::Armed && phase_ != Phase::Selected) return;
  try {
    const auto why = ddp::str(
        "backward threw on ", monitor_->rank_text(), ", before the first bucket was sent",
        cause ? ": " + text_of(cause) : "");
    companion_ ? companion_->failed(why) : void(monitor_->fail(why));
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

void Reducer::Engine::on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept {
  if (phase_ != Phase::Reducing || pass != pass_->number()) return;
  phase_ = Phase::Local;
  pass_->gradient_memory_scope.reset();
  averaged_.forget();
  try {
    monitor_->fail(ddp::str(
        "backward threw on ", monitor_->rank_text(), ", after ", pass_->next_bucket.load(), " of ",
        buckets_.size(), " buckets were sent", cause ? ": " + text_of(cause) : ""));
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

// Used by a rank with a backward pass of its own and by one that joins: both send the same
// collectives.
void Reducer::Engine::launch_rest() {
  observers_.notify([](PassObserver& o) { o.autograd_done(); });
  auto& next = pass_->next_bucket;
  while (next + 1 < buckets_.size()) launch(next++);
  // The companion sends between the same two buckets on every rank, and after autograd: a
  // checkpoint inside the backward pass runs parts of forward again, which change the buffers.
  if (companion_) {
    monitor_->abort_on_error(
        [&] { return ddp::str("sending the buffers of rank ", pass_->terms.source); },
        [&] { companion_->start(pass_->terms.source); });
  }
  launch(next++);
}

// A reduced pass of the other ranks: this rank has no backward pass of its own.
void Reducer::Engine::join_backward(const PassTerms& terms) {
  monitor_->check();
  const at::NoGradGuard no_grad;
  if (schedule_.rebuild_is_due()) rebuild_buckets();
  begin_pass(pass_->number());
  if (!terms.adds) averaged_.drop();
  pass_->joined = true;
  pass_->forwards = 1;
  pass_->terms = terms;
  phase_ = Phase::Reducing;
  launch_rest();
  finish_pass();
}

void Reducer::Engine::launch(size_t b) {
  RECORD_FUNCTION(ddp::str("ddp::launch_bucket ", b), c10::ArrayRef<const c10::IValue>());
  const at::NoGradGuard no_grad;
  const bool is_last = b + 1 == buckets_.size();
  monitor_->abort_on_error(
      [&] { return ddp::str("starting bucket ", b); },
      [&] {
        make_room_for(b);
        pack(b);
        if (is_last && buckets_.is_lazy() && !status_.uses_own_collective()) {
          choose_status_location();  // the bucket has its memory now
        }
        if (is_last && !status_.uses_own_collective()) send_status();
        const auto& bucket = buckets_[b];
        observers_.notify([&](PassObserver& o) { o.launching(b, bucket.bytes()); });
        auto& in_flight = pass_->bucket(b).in_flight;
        in_flight = reduction_->start(bucket, b, is_last, pass_->terms.scale);
        observers_.notify([&](PassObserver& o) { o.launched(b, in_flight, buckets_.on_cpu()); });
        if (is_last && status_.uses_own_collective()) send_status();
      });
}

// Waits for the bucket whose memory bucket `b` has next.
void Reducer::Engine::make_room_for(size_t b) {
  const auto buffers = reduction_->buffers();
  if (buffers == 0 || b < buffers) return;
  // Gloo's work keeps a copy, so it goes here.
  const auto work = std::exchange(pass_->bucket(b - buffers).in_flight.work, nullptr);
  if (!work) return;
  wait_on_stream(work, [&] {
    return ddp::str("reducing bucket ", b - buffers, " to make room for bucket ", b);
  });
}

void Reducer::Engine::pack(size_t b) {
  auto& bucket = buckets_[b];
  for (const auto parameter : bucket.indices()) set_average_aside(parameter, /*is_reduced=*/true);
  const bool needs_usage = usage_->tracks_usage() || pass_->joined;
  const auto* used = needs_usage ? &usage_->used() : nullptr;
  const auto unused = pass_->joined ? Bucket::Unused::Zero : Bucket::Unused::Save;
  const auto scale = reduction_->scale_of(bucket, pass_->terms.scale);
  // On a device each copy of a gradient is a kernel launch. On the CPU it is cheap, and a run of
  // one rank does and costs the same as one of several.
  const bool returns = !buckets_.on_cpu() && reduction_->returns_as_packed() && scale == 1;
  const bool searches = finds_nonfinite_ && !pass_->captured;  // nothing reads a replay's status
  if (returns && !pass_->joined && bucket.skip_pack(used)) {
    if (searches) pass_->nonfinite.search(bucket, used);
    return;
  }
  observers_.notify([](PassObserver& o) { o.begin_pack(); });
  auto* not_finite = searches ? &pass_->nonfinite.on_host() : nullptr;
  auto mismatches = bucket.pack(scale, used, unused, not_finite);
  if (searches && !bucket.device().is_cpu()) pass_->nonfinite.search(bucket, used);
  observers_.notify([](PassObserver& o) { o.end_pack(); });
  for (auto& mismatch : mismatches) {
    status_.report(
        {"expected gradients of the kind of their bucket, got others",
         "Convert them in a hook on the parameter, or the parameter.",
         {bucket.names()[mismatch.slot]},
         std::move(mismatch.difference)});
  }
}

// On a device the status carries a flag that the device sets, and error_of_pass() asks which.
void Reducer::Engine::report_nonfinite() {
  if (!pass_->nonfinite.on_host().empty()) {
    status_.report(*pass_->nonfinite.problem(pass_->number(), buckets_.parameters()));
    pass_->nonfinite.clear();
  }
}

void Reducer::Engine::send_status() {
  if (pass_->captured && group_->getSize() > 1) {
    pass_->problems = status_.write_zeros();
    return;
  }
  if (companion_ && !pass_->joined) pass_->forwards = companion_->forwards();
  const auto forwards = pass_->joined ? std::nullopt : std::optional<uint64_t>(pass_->forwards);
  const bool asks = companion_ && !pass_->joined && companion_->asks();
  if (finds_nonfinite_) report_nonfinite();
  pass_->problems = status_.write(forwards, usage_->used(), asks, observers_.timer.take());
  if (const auto flag = pass_->nonfinite.device_flag(status_.storage()); flag.defined()) {
    status_.add_problem_flag(flag);
  }
  if (status_.uses_own_collective()) pass_->status_work = status_.send(*group_);
}

}  // namespace ddp
