// The end of a pass: its buckets come back, the ranks agree on it, and gradients are final.
#include <algorithm>
#include <cmath>
#include <future>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "engine.h"
#include "problem_report.h"

namespace ddp {
namespace {

bool names_each_once(std::vector<size_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

}  // namespace

void Reducer::Engine::on_backward_done() {
  if (phase_ != Phase::Reducing) return;
  const at::NoGradGuard no_grad;
  // Not so at the end of a backward pass inside another one (reentrant autograd), whose own
  // gradients are still to come.
  if (!pass_->is_complete() && torch::autograd::get_current_node()) return;
  for (auto& problem : usage_->check(*pass_)) status_.report(std::move(problem));
  finish_pass();
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
  finish_pass();
}

// From here on it does not matter whether this rank had a backward pass of its own.
void Reducer::Engine::finish_pass() {
  observers_.tell([](PassObserver& o) { o.autograd_done(); });
  auto& next = pass_->next_bucket;
  while (next + 1 < buckets_.size()) launch(next++);
  // Between the same two buckets on every rank, and when the data is final: a checkpoint inside the
  // backward pass runs parts of forward again.
  if (companion_) {
    monitor_->abort_on_error(
        [&] { return c10::str("sending the buffers of rank ", pass_->terms.source); },
        [&] { companion_->start(pass_->terms.source); });
  }
  launch(next++);
  wait_for_buckets();
  if (!pass_->joined) observers_.tell([](PassObserver& o) { o.communicated(); });

  std::vector<char> unused;
  std::string objection;
  if (auto* judged = await_verdict()) objection = objection_to(*judged, unused);
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
  phase_ = pass_->joined ? Phase::Local : Phase::Done;
  const auto number = pass_->number();
  if (runs_ahead()) {
    std::swap(pass_, deferred_);
    if (!pass_) pass_ = std::make_unique<BackwardPass>();
  }
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
  const auto where = [&] { return c10::str("getting the buffers of rank ", pass_->terms.source); };
  monitor_->abort_on_error(where, [&] {
    // The step is over when they are there, on the host or in the order of the stream.
    companion_->finish([&](c10d::Work& work) {
      runs_ahead() ? monitor_->wait_on_stream(work, where) : wait_for(work, where);
    });
  });
}

void Reducer::Engine::wait_for_bucket(size_t b) {
  const auto where = [&] {
    return c10::str(
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
    pass_->bucket(b).reduced = result_of(std::move(in_flight), buckets_[b]);
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
  pass_->status = status_.fetch();
  auto* judged = runs_ahead() ? deferred_.get() : pass_.get();
  if (judged) await(*judged);
  return judged;
}

void Reducer::Engine::await(BackwardPass& pass) {
  const auto where = [&] {
    return c10::str("exchanging the ranks' status of backward pass ", pass.number());
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
        {c10::str(
             pass.forwards, " training forward passes came since the last reduced backward pass"),
         "Every rank has to run as many forward and backward passes; evaluate in eval() mode or "
         "under torch::NoGradGuard."});
  }
  unused = std::move(status.unused);
  if (!status.problems && status.same_forwards) return "";
  const auto where = [] { return std::string("gathering the ranks' errors"); };
  std::string text;
  monitor_->abort_on_error(where, [&] {
    text = gather_problems(pass.problems, group_, [&](c10d::Work& work) { wait_for(work, where); });
  });
  return text;
}

void Reducer::Engine::finalize_bucket(size_t b, const std::vector<char>& unused) {
  auto& bucket = buckets_[b];
  monitor_->abort_on_error(
      [&] { return c10::str("writing the averages of bucket ", b); },
      [&] { bucket.unpack(std::exchange(pass_->bucket(b).reduced, {}), unused); });
  if (!when_reduced_ || pass_->after_reduction_threw) return;
  try {
    when_reduced_(bucket.parameters(), b + 1 == buckets_.size());
  } catch (...) {
    // The other ranks count on this one's part of the pass.
    pass_->after_reduction_threw = std::current_exception();
  }
}

/// \return  the cap in bytes that this rank would choose; what it measured is the ranks' together.
int64_t Reducer::Engine::tune() {
  const auto where = [] { return std::string("measuring what the link costs"); };
  LinkCost cost;
  monitor_->abort_on_error(where, [&] {
    cost = observers_.tuner->link_cost(
        buckets_.gradient_bytes(), buckets_.size(),
        [&](c10d::Work& work) { wait_for(work, where); });
  });
  // This rank's input ended early, or all ranks' did.
  if (!observers_.tuner->has_enough() || !std::isfinite(cost.ms_per_byte)) {
    return kDefaultBucketCapBytes;
  }
  observers_.tuned = choose_bucket_cap(
      extents_of(buckets_.parameters()), [&](int64_t cap) { return schedule_.plan_under(cap); },
      observers_.tuner->step_times(), cost);
  return bytes_of_mb(observers_.tuned->cap_mb);
}

// All ranks take rank `source`'s order of gradients, and with it the cap where that is tuned.
void Reducer::Engine::agree_on_order() {
  const auto where = [] { return std::string("agreeing on the order of the buckets"); };
  const auto& own = schedule_.order();
  std::vector<int64_t> mine(own.begin(), own.end());
  const bool tunes = observers_.tuner != nullptr;
  if (tunes) mine.push_back(tune());
  auto agreed = at::tensor(mine, at::kLong).to(buckets_.parameters().front().tensor.device());
  monitor_->abort_on_error(where, [&] {
    if (group_->getSize() == 1) return;
    std::vector<at::Tensor> tensors{agreed};
    c10d::BroadcastOptions options;
    options.rootRank = pass_->terms.source;
    wait_for(*group_->broadcast(tensors, options), where);
    agreed = tensors.front().cpu();
  });
  agreed = agreed.cpu();
  const auto* begin = agreed.const_data_ptr<int64_t>();
  std::vector<size_t> order(begin, begin + own.size());
  monitor_->abort_on_error(where, [&] {
    TORCH_CHECK(
        names_each_once(order),
        "expected an order of the buckets, got something else: a rank "
        "communicates out of turn. Every rank has to run the same collectives");
  });
  std::optional<int64_t> cap;
  if (tunes) {
    cap = begin[own.size()];
    if (!observers_.tuned) observers_.tuned.emplace();
    choose(*observers_.tuned, *cap);
    observers_.tuner.reset();
  }
  schedule_.adopt(std::move(order), cap);
}

// What nobody comes to hear of in an error any more.
void Reducer::Engine::warn_of_last_pass() const noexcept {
  if (!deferred_ || deferred_->problems.empty() || monitor_->aborted()) return;
  try {
    std::vector<std::vector<Problem>> by_rank(static_cast<size_t>(group_->getSize()));
    by_rank[static_cast<size_t>(group_->getRank())] = deferred_->problems;
    TORCH_WARN("The last reduced backward pass was wrong. ", describe_problems(by_rank));
  } catch (const std::exception&) {
    // A warning handler that throws.
  }
}

}  // namespace ddp
