// The way out: the end of a backward pass.
#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <ddp/error_text.h>
#include <ddp/reducer.h>
#include <torch/csrc/autograd/function.h>

#include "bucket.h"
#include "bucket_tuner.h"
#include "past_pass.h"
#include "peer_notes.h"
#include "problem_report.h"
#include "status_board.h"
#include "step_recorder.h"

namespace ddp {
namespace {

// How long a rank waits for a collective before it looks whether the others have trouble.
constexpr std::chrono::milliseconds kPatience{500};
// How often it looks whether a collective on a device is over, which cannot wake it.
constexpr std::chrono::microseconds kPollEvery{50};

// What a communication hook's future holds: a tensor, or a list of one, as c10d's work gives.
at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensorList() && value.toTensorList().size() == 1) return value.toTensorList().get(0);
  TORCH_CHECK(
      value.isTensor(), "expected the communication hook's future to hold a tensor, got ",
      value.tagKind());
  return value.toTensor();
}

// Whether it was over within kPatience. What is on a device wakes nobody.
bool poll_a_little(c10::function_ref<bool()> is_over) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!is_over()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPollEvery);
  }
  return true;
}

// The same for `work`, well or not.
bool wait_a_little(c10d::Work& work, bool on_cpu) {
  if (on_cpu) {
    try {
      work.wait(kPatience);
    } catch (const std::exception&) {
      // Late, or failed: the difference is whether it is over.
    }
    return work.isCompleted();
  }
  // On a device wait() is a matter of streams.
  return poll_a_little([&] { return work.isCompleted(); });
}

}  // namespace

void Reducer::finish_backward() {
  if (phase_ != Phase::Reducing) return;
  callback_queued_ = false;
  const at::NoGradGuard no_grad;
  const bool complete = std::all_of(
      buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.pending == 0; });
  // Not so at the end of a backward pass inside another one (reentrant autograd), whose own
  // gradients are still to come.
  if (!complete && torch::autograd::get_current_node()) return;
  // Where gradients may be missing, those that no search foretold turn out to be missing here.
  if (is_counting() || order_ == Order::Kept) {
    note_detached();
  } else if (!complete) {
    note_missing();
  }
  finish_pass();
}

void Reducer::shadow_backward(std::optional<double> scale) {
  TORCH_CHECK_WITH(DistBackendError, phase_ != Phase::Broken, broken_because_);
  const at::NoGradGuard no_grad;
  start_pass();
  scale_ = scale;
  training_forwards_ = 1;
  shadowing_ = true;
  phase_ = Phase::Reducing;
  finish_pass();
}

// From here on it does not matter whether this rank had a backward pass of its own.
void Reducer::finish_pass() {
  when_reduced_threw_ = nullptr;
  recorder_->autograd_done();
  if (tuner_) tuner_->autograd_done();
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);
  wait_for_buckets();
  if (tuner_ && !shadowing_) tuner_->end_pass();
  auto past = past_pass();
  ++pass_;
  const bool shadowed = std::exchange(shadowing_, false);
  phase_ = shadowed ? Phase::Local : Phase::Done;
  training_forwards_ = 0;
  const auto unused = past ? agreed_unused(*past) : std::vector<char>();
  if (is_counting() && !shadowed) end_static_count();
  const bool records = passes_to_record_ > 0 && (order_ == Order::Expected || tuner_);
  if (records && --passes_to_record_ == 0 && order_ == Order::Expected) record_order();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].reduced.defined()) hand_over(b, unused, shadowed);
  }
  std::fill(used_.begin(), used_.end(), 0);
  shadowed ? recorder_->drop() : recorder_->end();
  start_pass();
  if (const auto threw = std::exchange(when_reduced_threw_, nullptr)) std::rethrow_exception(threw);
}

// The pass whose status is to be looked at now: this one, or where the host runs ahead the one
// before, which it waits for on the device too. Which one does not depend on timing, so it is the
// same on every rank.
std::unique_ptr<PastPass> Reducer::past_pass() {
  std::unique_ptr<PastPass> past;
  or_break_off(
      [] { return std::string(kExchangingStatus); },
      [&] {
        past = std::make_unique<PastPass>(PastPass{
            pass_, std::exchange(works_, {}), status_->fetch(), std::exchange(sent_problems_, {}),
            training_forwards_});
        if (runs_ahead_) std::swap(past, past_);
        if (past) wait_for(*past);
      });
  return past;
}

void Reducer::wait_for(const PastPass& past) {
  const auto place = [] { return std::string("the status"); };
  const auto is_over = [&] {
    bool over = past.status.is_here();
    for (const auto& work : past.works) {
      if (!work->isCompleted()) {
        over = false;
      } else if (work->exception()) {
        or_tell_arrivals(place, [&] { std::rethrow_exception(work->exception()); });
      }
    }
    return over;
  };
  // Whoever is in trouble is so in that pass, and looks for this rank there.
  const auto pass = std::exchange(pass_, past.number);
  const auto forwards = std::exchange(training_forwards_, past.forwards);
  look_out_until([&] { return poll_a_little(is_over); }, place);
  pass_ = pass;
  training_forwards_ = forwards;
}

// \return  the parameters without a gradient on any rank; empty where that is not asked.
std::vector<char> Reducer::agreed_unused(PastPass& past) {
  auto status = past.status.read();
  if (!status.same_forwards) {
    past.problems.push_back(
        {c10::str(
             past.forwards, " training forward passes came since the last reduced backward pass"),
         "Every rank has to run as many forward and backward passes; evaluate in eval() mode or "
         "under torch::NoGradGuard."});
  }
  if (status.problems || !status.same_forwards) throw_problems(std::move(past.problems));
  return std::move(status.unused);
}

// Gradients of a bucket are final.
void Reducer::hand_over(size_t index, const std::vector<char>& unused, bool shadowed) {
  auto& bucket = buckets_[index];
  or_break_off(
      [&] { return c10::str("writing the averages of bucket ", index); },
      [&] { bucket.scatter(std::exchange(bucket.reduced, {}), unused); });
  if (!when_reduced_ || shadowed || when_reduced_threw_) return;
  try {
    when_reduced_(bucket.parameters(), index + 1 == buckets_.size());
  } catch (...) {
    // The other ranks count on this one's part of the pass.
    when_reduced_threw_ = std::current_exception();
  }
}

// Parameters that were not seen to become ready come last.
void Reducer::record_order() {
  std::vector<char> seen(slots_.size(), 0);
  for (size_t i = 0; i < ready_count_; ++i) seen[ready_order_[i]] = 1;
  for (size_t i = slots_.size(); i-- > 0;) {
    if (!seen[i]) ready_order_[ready_count_++] = i;
  }
  order_ = Order::Recorded;
}

// Each rank's set of used parameters is its own; the buckets are the same all the same.
void Reducer::end_static_count() {
  for (auto& slot : slots_) slot.expected = slot.fired;
  counted_ = true;
}

void Reducer::wait_for_buckets() {
  RECORD_FUNCTION("ddp::wait_for_buckets", c10::ArrayRef<const c10::IValue>());
  // Where a pass may skip parameters, the last bucket says which gradients are to be left alone.
  const bool early = when_reduced_ && !shadowing_ && !status_->tracks_usage() && !tuner_;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = buckets_[b];
    or_break_off(
        [&] {
          return c10::str(
              "reducing bucket ", b, " of ", buckets_.size(), " (", bucket.bytes(),
              " bytes: ", join_names(bucket.names()), ")");
        },
        [&] { bucket.reduced = wait_for(bucket, b); });
    recorder_->waited(b);
    if (early && b + 1 < buckets_.size()) hand_over(b, {}, /*shadowed=*/false);
  }
  or_break_off(
      [] { return std::string(kExchangingStatus); },
      [&] {
        if (const auto work = std::exchange(status_work_, {}))
          follow(work, [] { return std::string("the status"); });
      });
}

at::Tensor Reducer::wait_for(Bucket& bucket, size_t index) {
  const auto place = [&] { return c10::str("bucket ", index); };
  if (const auto work = std::exchange(bucket.work, {})) follow(work, place);
  const auto future = std::exchange(bucket.future, {});
  if (!future) return bucket.gradients();
  if (!future->completed() && bucket.parameters().front().is_cpu()) {
    const auto arrived = std::make_shared<std::promise<void>>();
    future->addCallback([arrived](c10::ivalue::Future&) { arrived->set_value(); });
    auto arrival = arrived->get_future();
    look_out_until([&] { return arrival.wait_for(kPatience) == std::future_status::ready; }, place);
  }
  or_tell_arrivals(place, [&] { future->waitAndThrow(); });
  const auto result = tensor_of(future->value());
  const auto& expected = bucket.gradients();
  const auto described = [](const at::Tensor& t) {
    if (!t.defined()) return std::string("an undefined tensor");
    return c10::str(
        t.numel(), " elements of ", t.scalar_type(), " on ", t.device(), ", layout ", t.layout());
  };
  TORCH_CHECK(
      result.defined() && result.numel() == expected.numel() &&
          result.scalar_type() == expected.scalar_type() && result.device() == expected.device() &&
          result.layout() == expected.layout(),
      "expected the communication hook to return ", described(expected), ", got ",
      described(result));
  return bucket.is_sparse() ? result : result.resolve_conj().contiguous().view(-1);
}

void Reducer::wait_for(c10d::Work& work, c10::function_ref<std::string()> place) {
  look_out_until([&] { return work.isCompleted() || wait_a_little(work, on_cpu()); }, place);
  or_tell_arrivals(place, [&] { work.wait(); });
}

// A part of the pass, which the host need not see the end of, but to take the time.
void Reducer::follow(
    const c10::intrusive_ptr<c10d::Work>& work, c10::function_ref<std::string()> place) {
  if (!runs_ahead_ || recorder_->is_sampling()) return wait_for(*work, place);
  or_tell_arrivals(place, [&] { work->wait(); });
  works_.push_back(work);
}

void Reducer::or_tell_arrivals(
    c10::function_ref<std::string()> place, c10::function_ref<void()> wait) {
  try {
    wait();
  } catch (const std::exception&) {
    const auto arrivals = notes_->arrivals(whereabouts(place()));
    if (arrivals.empty()) throw;
    TORCH_CHECK_WITH(
        DistBackendError, false, text_of(std::current_exception()), "; ", arrivals, " in ",
        place());
  }
}

void Reducer::wait_before_forward(c10d::Work& work, const std::string& what, bool host_reads) {
  settle();  // where another class of a join began its round before this one could
  or_break_off(
      [&] { return "getting " + what + " before forward"; },
      [&] {
        if (runs_ahead_ && !host_reads) {
          work.wait();
        } else {
          wait_for(work, [&] { return what; });
        }
      });
  ++waits_before_forward_;
}

}  // namespace ddp
