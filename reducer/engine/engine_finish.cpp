// The end of a pass: waits for the buckets, reads the ranks' status, and makes gradients final.
#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <ddp/internal/check.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/light_work.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "engine/engine.h"
#include "status/problem_report.h"

namespace ddp {
namespace {

// The parameters of `bucket` without those that no rank used in this pass. A rank that joined the
// pass still has the gradients of its own last pass for these, and on_bucket_reduced() must not
// step them: the ranks with input do not.
std::vector<at::Tensor> used_parameters(const Bucket& bucket, const std::vector<char>& unused) {
  std::vector<at::Tensor> used;
  for (size_t slot = 0; slot < bucket.indices().size(); ++slot) {
    if (!unused[bucket.indices()[slot]]) used.push_back(bucket.parameters()[slot]);
  }
  return used;
}

// A communication hook's future holds a tensor, or a list of one, as the futures of c10d's works.
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

// The reduced gradients of `bucket`, 1-D; after a hook the value of its future, which is complete.
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
  auto error = deferred_error();
  // Where a pass may skip parameters, the status in the last bucket says which gradients must not
  // change, so no bucket can be finalized before.
  const bool early = !usage_->tracks_usage() && !observers_.tuner;
  wait_for_buckets(error.empty() && early && (on_bucket_reduced_ || runs_ahead()));
  if (!pass_->joined) observers_.notify([](PassObserver& o) { o.communicated(); });

  std::vector<char> unused;
  if (auto own = own_error(unused); error.empty()) error = std::move(own);
  PassError of_companion;
  if (companion_ && error.empty()) of_companion = companion_->error();
  if (error.empty()) error = std::move(of_companion.text);
  if (std::exchange(pass_->asked, false) && companion_ && error.empty()) companion_->answer();
  if (error.empty()) {
    if (!pass_->joined) usage_->end_pass(*pass_);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (pass_->bucket(b).reduced.defined()) finalize_bucket(b, unused);
    }
    if (schedule_.end_pass()) agree_on_order();
    observers_.notify([&](PassObserver& o) { o.end_pass(pass_->joined); });
  } else {
    averaged_.forget();
  }
  const auto threw = std::exchange(pass_->callback_exception, nullptr);
  end_pass();
  if (!error.empty()) monitor_->throw_agreed(error, of_companion.wrong_ranks);
  if (!threw) return;
  monitor_->fail(ddp::str(
      "a step in the backward pass threw on ", monitor_->rank_text(), ", whose model is no longer ",
      "the others': ", text_of(threw)));
  std::rethrow_exception(threw);
}

void Reducer::Engine::end_pass() {
  if (!pass_->joined && !pass_->captured) usage_->compare_passes();
  if (observers_.rate.is_counted()) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    observers_.rate.end_pass(std::chrono::duration<double>(now).count());
  }
  usage_->clear_used();
  unaveraged_.clear();
  phase_ = pass_->joined ? Phase::Local : Phase::Done;
  const auto number = pass_->number();
  const auto terms = pass_->terms;
  if (runs_ahead() && !pass_->captured) {
    std::swap(pass_, deferred_);
    if (!pass_) pass_ = std::make_unique<BackwardPass>();
  }
  pass_->captured = false;
  pass_->terms = terms;  // a further backward pass without a forward pass uses them again
  if (companion_) companion_->end();
  pass_->joined = false;
  pass_->forwards = 0;
  pass_->problems.clear();
  pass_->nonfinite.clear();
  pass_->works.clear();
  pass_->status.reset();
  if (buckets_.is_lazy()) {
    buckets_.release();
    choose_status_location();
  }
  begin_pass(number + 1);
}

/// \param finalizes  each bucket but the last as it returns, while others travel.
void Reducer::Engine::wait_for_buckets(bool finalizes) {
  RECORD_FUNCTION("ddp::wait_for_buckets", c10::ArrayRef<const c10::IValue>());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    wait_for_bucket(b);
    observers_.notify([&](PassObserver& o) { o.reduced(b); });
    if (finalizes && b + 1 < buckets_.size()) finalize_bucket(b, {});
  }
  if (const auto work = std::exchange(pass_->status_work, {})) {
    wait_on_stream(work, [] { return std::string("exchanging the ranks' status"); });
  }
  if (!companion_) return;
  const auto where = [&] { return ddp::str("getting the buffers of rank ", pass_->terms.source); };
  monitor_->abort_on_error(where, [&] {
    // The step ends when the buffers have arrived, on the host or in stream order.
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
    if (in_flight.work) wait_on_stream(in_flight.work, where);
    if (const auto& future = in_flight.future) {
      if (!future->completed() && buckets_.on_cpu()) {
        const auto arrived = std::make_shared<std::promise<void>>();
        future->addCallback([arrived](c10::ivalue::Future&) { arrived->set_value(); });
        auto arrival = arrived->get_future();
        const auto has_arrived = [&](std::chrono::milliseconds at_most) {
          if (arrival.wait_for(at_most) != std::future_status::ready) return false;
          monitor_->abort_on_error(where, [&] { future->waitAndThrow(); });
          return true;
        };
        monitor_->wait_until(has_arrived, where);
      }
      future->waitAndThrow();
    }
    pass_->bucket(b).reduced = result_of(in_flight, buckets_[b]);
  });
}

void Reducer::Engine::wait_for(c10d::Work& work, WaitPoint where) {
  if (buckets_.on_cpu()) return monitor_->wait(work, where);
  monitor_->poll([&] { return work.isCompleted(); }, where, Peers::All, &work);
  monitor_->wait_on_stream(work, where);
}

// Makes the stream wait for `work`; the host waits as well only where it does not run ahead of the
// device, or where it takes the times of this step.
void Reducer::Engine::wait_on_stream(const c10::intrusive_ptr<c10d::Work>& work, WaitPoint where) {
  if (!runs_ahead() || observers_.recorder.makes_host_wait()) return wait_for(*work, where);
  monitor_->wait_on_stream(*work, where);
  // Lazy buckets are freed at the end of this pass, and the next pass reads these.
  pass_->works.push_back(without_tensors(work));
}

// Returns the error of the previous pass, whose status is due now where the host runs ahead of the
// device: after this pass has queued all its work.
std::string Reducer::Engine::deferred_error() {
  if (!runs_ahead() || pass_->captured || !deferred_ || !deferred_->status) return "";
  std::vector<char> unused;
  wait_for_pass_status(*deferred_);
  return error_of_pass(*deferred_, unused);
}

// Fetches the status of this pass. Returns its error, unless the host runs ahead of it.
std::string Reducer::Engine::own_error(std::vector<char>& unused) {
  if (pass_->captured && group_->getSize() > 1) {
    check_captured_pass();
    return "";
  }
  pass_->status = status_.fetch();
  if (runs_ahead()) return "";
  wait_for_pass_status(*pass_);
  return error_of_pass(*pass_, unused);
}

void Reducer::Engine::settle() {
  const auto phase = phase_.load();
  DDP_CHECK(
      phase != Phase::Reducing && phase != Phase::Sent,
      "settle: expected to be called between two steps, got a call before the end of an averaged "
      "backward pass on ",
      monitor_->rank_text(),
      ". Call it after backward() has returned, and after finalize_backward() where the program "
      "calls that.");
  monitor_->check();
  const auto error = deferred_error();
  deferred_.reset();
  if (!error.empty()) monitor_->throw_agreed(error);
}

// Throws for the problems of a captured pass, which only this rank knows: the device has not run
// it, so no status was exchanged. abort_on_error makes the other ranks fail with the same text.
void Reducer::Engine::check_captured_pass() {
  const auto where = [] { return std::string("capturing a backward pass"); };
  monitor_->abort_on_error(
      where, [&] { DDP_CHECK(pass_->problems.empty(), describe_own_problems(*pass_)); });
}

void Reducer::Engine::wait_for_pass_status(BackwardPass& pass) {
  const auto where = [&] {
    return ddp::str("exchanging the ranks' status of backward pass ", pass.number());
  };
  const auto is_over = [&] {
    bool over = pass.status->is_ready();
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

/// \return  the text that every rank throws; "" when no rank met a problem.
std::string Reducer::Engine::error_of_pass(BackwardPass& pass, std::vector<char>& unused) {
  auto status = pass.status->read();
  if (!status.same_forwards) {
    pass.problems.push_back(
        {ddp::str(
             pass.forwards, " training forward passes came since the last reduced backward pass"),
         "Every rank has to run as many forward and backward passes; evaluate in eval() mode or "
         "under torch::NoGradGuard, and put a loop that calls forward into one run()."});
  }
  if (status.problems) {
    auto found = pass.nonfinite.problem(pass.number(), buckets_.parameters());
    if (found) pass.problems.push_back(std::move(*found));
  }
  observers_.keep(std::move(status.times));
  unused = std::move(status.unused);
  pass_->asked = pass_->asked || status.asks;
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
      [&] {
        bucket.unpack(std::exchange(pass_->bucket(b).reduced, {}), unused);
        for (const auto parameter : bucket.indices()) {
          averaged_.add_back(parameter, unused.empty() || !unused[parameter]);
        }
      });
  if (!on_bucket_reduced_ || pass_->callback_exception) return;
  try {
    const bool last = b + 1 == buckets_.size();
    pass_->joined && !unused.empty() ? on_bucket_reduced_(used_parameters(bucket, unused), last)
                                     : on_bucket_reduced_(bucket.parameters(), last);
  } catch (...) {
    // Thrown at the end of the pass: the other ranks wait for this one's part of it.
    pass_->callback_exception = std::current_exception();
  }
}

}  // namespace ddp
