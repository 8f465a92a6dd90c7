// The end of a pass: its buckets come back, the ranks agree on it, and gradients are final.
#include <algorithm>
#include <cmath>
#include <future>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <ddp/internal/check.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "engine.h"
#include "problem_report.h"

namespace ddp {
namespace {

// The ranks with input have no gradient of a parameter that no rank used. This one, which has
// joined, still has that of its own last pass.
std::vector<at::Tensor> used_parameters(const Bucket& bucket, const std::vector<char>& unused) {
  std::vector<at::Tensor> used;
  for (size_t slot = 0; slot < bucket.indices().size(); ++slot) {
    if (!unused[bucket.indices()[slot]]) used.push_back(bucket.parameters()[slot]);
  }
  return used;
}

// What a communication hook's future holds: a tensor, or a list of one, as c10d's work gives.
at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensorList() && value.toTensorList().size() == 1) return value.toTensorList().get(0);
  DDP_CHECK(
      value.isTensor(), "expected the communication hook's future to hold a tensor, got ",
      value.tagKind());
  return value.toTensor();
}

std::string describe_result(const at::Tensor& t) {
  if (!t.defined()) return "an undefined tensor";
  return ddp::str(
      t.numel(), " elements of ", t.scalar_type(), " on ", t.device(), ", layout ", t.layout());
}

// What came back for `bucket`, 1-D: of a hook what its future holds, which is complete.
at::Tensor result_of(const BucketReduction::InFlight& in_flight, const Bucket& bucket) {
  if (!in_flight.future) return bucket.gradients();
  const auto result = tensor_of(in_flight.future->value());
  const auto& expected = bucket.gradients();
  DDP_CHECK(
      result.defined() && result.numel() == expected.numel() &&
          result.scalar_type() == expected.scalar_type() && result.device() == expected.device() &&
          result.layout() == expected.layout(),
      "expected the communication hook to return ", describe_result(expected), ", got ",
      describe_result(result));
  return bucket.is_sparse() ? result : result.resolve_conj().contiguous().view(-1);
}

}  // namespace

void Reducer::Engine::finish_pass() {
  wait_for_buckets();
  if (!pass_->joined) observers_.tell([](PassObserver& o) { o.communicated(); });

  std::vector<char> unused;
  std::string objection;
  if (auto* judged = await_verdict()) objection = objection_to(*judged, unused);
  if (companion_ && objection.empty()) objection = companion_->objection();
  if (objection.empty()) {
    if (!pass_->joined) usage_->end_pass(*pass_);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (pass_->bucket(b).reduced.defined()) finalize_bucket(b, unused);
    }
    if (schedule_.end_pass()) agree_on_order();
    observers_.tell([&](PassObserver& o) { o.end_pass(pass_->joined); });
  }
  const auto threw = std::exchange(pass_->after_reduction_threw, nullptr);
  end_pass();
  if (!objection.empty()) monitor_->throw_agreed(objection);
  if (threw) std::rethrow_exception(threw);
}

void Reducer::Engine::end_pass() {
  usage_->clear_used();
  bare_.clear();
  phase_ = pass_->joined ? Phase::Local : Phase::Done;
  const auto number = pass_->number();
  const auto terms = pass_->terms;
  if (runs_ahead() && !pass_->captured) {
    std::swap(pass_, deferred_);
    if (!pass_) pass_ = std::make_unique<BackwardPass>();
  }
  pass_->captured = false;
  pass_->terms = terms;  // for a further backward pass without a forward pass
  monitor_->end_attempts();
  pass_->joined = false;
  pass_->forwards = 0;
  pass_->problems.clear();
  pass_->works.clear();
  pass_->status.reset();
  begin_pass(number + 1);
}

void Reducer::Engine::wait_for_buckets() {
  RECORD_FUNCTION("ddp::wait_for_buckets", c10::ArrayRef<const c10::IValue>());
  // Where a pass may skip parameters, the last bucket says which gradients are to be left alone.
  const bool early = when_reduced_ && !usage_->tracks_usage() && !observers_.tuner;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    wait_for_bucket(b);
    observers_.tell([&](PassObserver& o) { o.reduced(b); });
    if (early && b + 1 < buckets_.size()) finalize_bucket(b, {});
  }
  if (const auto work = std::exchange(pass_->status_work, {})) {
    follow(work, [] { return std::string("exchanging the ranks' status"); });
  }
  if (!companion_) return;
  const auto where = [&] { return ddp::str("getting the buffers of rank ", pass_->terms.source); };
  monitor_->abort_on_error(where, [&] {
    // The step is over when they are there, on the host or in the order of the stream.
    companion_->finish([&](c10d::Work& work) {
      runs_ahead() ? monitor_->wait_on_stream(work, where) : wait_for(work, where);
    });
  });
}

void Reducer::Engine::wait_for_bucket(size_t b) {
  const auto where = [&] {
    return ddp::str(
        "reducing bucket ", b, " of ", buckets_.size(), " (", buckets_[b].bytes(),
        " bytes: ", join_names(buckets_[b].names()), ") in backward pass ", pass_->number());
  };
  monitor_->abort_on_error(where, [&] {
    auto in_flight = std::exchange(pass_->bucket(b).in_flight, {});
    if (in_flight.work) follow(in_flight.work, where);
    if (const auto& future = in_flight.future) {
      if (!future->completed() && buckets_.on_cpu()) {
        const auto arrived = std::make_shared<std::promise<void>>();
        future->addCallback([arrived](c10::ivalue::Future&) { arrived->set_value(); });
        auto arrival = arrived->get_future();
        monitor_->wait_until(
            [&](auto at_most) { return arrival.wait_for(at_most) == std::future_status::ready; },
            where);
      }
      future->waitAndThrow();
    }
    pass_->bucket(b).reduced = result_of(in_flight, buckets_[b]);
  });
}

void Reducer::Engine::wait_for(c10d::Work& work, WaitPoint where) {
  if (buckets_.on_cpu()) return monitor_->wait(work, where);
  monitor_->poll([&] { return work.isCompleted(); }, where);
  monitor_->wait_on_stream(work, where);
}

// A part of the pass, which the host need not see the end of, but to take the time.
void Reducer::Engine::follow(const c10::intrusive_ptr<c10d::Work>& work, WaitPoint where) {
  if (!runs_ahead() || observers_.recorder.is_sampling()) return wait_for(*work, where);
  monitor_->wait_on_stream(*work, where);
  pass_->works.push_back(work);
}

// The pass whose status is to be looked at now: this one, or the one before, which the host waits
// for on the device too; null for none.
BackwardPass* Reducer::Engine::await_verdict() {
  if (pass_->captured && group_->getSize() > 1) {
    judge_capture();
    return nullptr;
  }
  pass_->status = status_.fetch();
  auto* judged = runs_ahead() ? deferred_.get() : pass_.get();
  if (judged) await(*judged);
  return judged;
}

// What this rank alone knows of a pass that the device has not run. No rank hears of it from the
// device, so the group's failure tells the others.
void Reducer::Engine::judge_capture() {
  const auto where = [] { return std::string("capturing a backward pass"); };
  monitor_->abort_on_error(
      where, [&] { DDP_CHECK(pass_->problems.empty(), describe_own_problems(*pass_)); });
}

void Reducer::Engine::await(BackwardPass& pass) {
  const auto where = [&] {
    return ddp::str("exchanging the ranks' status of backward pass ", pass.number());
  };
  const auto is_over = [&] {
    bool over = pass.status->is_here();
    for (const auto& work : pass.works) {
      if (!work->isCompleted()) {
        over = false;
      } else if (work->exception()) {
        std::rethrow_exception(work->exception());
      }
    }
    return over;
  };
  monitor_->abort_on_error(where, [&] { monitor_->poll(is_over, where); });
}

/// \return  the text that every rank throws; "" when all is well.
std::string Reducer::Engine::objection_to(BackwardPass& pass, std::vector<char>& unused) {
  auto status = pass.status->read();
  if (!status.same_forwards) {
    pass.problems.push_back(
        {ddp::str(
             pass.forwards, " training forward passes came since the last reduced backward pass"),
         "Every rank has to run as many forward and backward passes; evaluate in eval() mode or "
         "under torch::NoGradGuard."});
  }
  unused = std::move(status.unused);
  if (!status.problems && status.same_forwards) return "";
  const auto where = [] { return std::string("gathering the ranks' errors"); };
  std::string text;
  monitor_->abort_on_error(where, [&] {
    text = gather_problems(
        pass.problems, buckets_.parameters().size(), group_,
        [&](c10d::Work& work) { wait_for(work, where); });
  });
  return text;
}

void Reducer::Engine::finalize_bucket(size_t b, const std::vector<char>& unused) {
  auto& bucket = buckets_[b];
  monitor_->abort_on_error(
      [&] { return ddp::str("writing the averages of bucket ", b); },
      [&] { bucket.unpack(std::exchange(pass_->bucket(b).reduced, {}), unused); });
  if (!when_reduced_ || pass_->after_reduction_threw) return;
  try {
    const bool last = b + 1 == buckets_.size();
    pass_->joined && !unused.empty() ? when_reduced_(used_parameters(bucket, unused), last)
                                     : when_reduced_(bucket.parameters(), last);
  } catch (...) {
    // The other ranks count on this one's part of the pass.
    pass_->after_reduction_threw = std::current_exception();
  }
}

}  // namespace ddp
