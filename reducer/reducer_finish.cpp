// The way out: the end of a backward pass, and what becomes of errors.
#include <algorithm>
#include <exception>
#include <future>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <ddp/reducer.h>
#include <torch/csrc/autograd/function.h>

#include "bucket.h"
#include "peer_notes.h"
#include "problem_report.h"
#include "status_board.h"

namespace ddp {
namespace {

// How long a rank waits for a collective before it looks whether the others have trouble.
constexpr std::chrono::milliseconds kPatience{500};
// How long a rank that failed waits for the others to say that they failed in the same way.
constexpr std::chrono::milliseconds kSettlePatience{5000};

std::string text_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
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
  if (!complete && !is_counting() && order_ != Order::Kept) note_missing();
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);

  const auto reduced = wait_for_buckets();
  const auto status = status_->read();
  ++pass_;
  phase_ = Phase::Done;
  if (!status.same_forwards) {
    report_problem(
        c10::str(
            training_forwards_,
            " training forward passes came since the last reduced backward pass"),
        "Every rank has to run as many forward and backward passes; evaluate in eval() mode or "
        "under "
        "torch::NoGradGuard.");
  }
  training_forwards_ = 0;
  if (status.problems || !status.same_forwards) throw_problems();

  if (is_counting()) {
    end_static_count();
  } else if (order_ == Order::Expected) {
    // Parameters that are known to stay without gradient come last.
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].expected == 0) ready_order_[ready_count_++] = i;
    }
    order_ = Order::Recorded;
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    std::vector<char> untouched;
    if (status_->tracks_usage()) {
      for (const size_t index : buckets_[b].indices()) untouched.push_back(status.unused[index]);
    }
    buckets_[b].scatter(reduced[b], options_.gradient_as_bucket_view(), untouched);
  }
  std::fill(used_.begin(), used_.end(), 0);
  start_pass();
}

void Reducer::note_missing() {
  std::vector<std::string> missing;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].ready) continue;
    const auto why = explain_missing_ ? explain_missing_(parameters_[i]) : std::string();
    missing.push_back(parameters_[i].name + (why.empty() ? "" : ": " + why));
  }
  if (missing.empty()) return;
  const auto what = c10::str(
      "backward ended without gradients for ", missing.size(), " of ", parameters_.size(),
      " parameters (", join_names(missing), ")");
  if (options_.static_graph()) {
    report_problem(
        what,
        "They had some in the first iteration, and static_graph set to true needs the same "
        "graph in each.");
  } else {
    report_problem(
        what,
        "If a forward pass may skip parameters, set find_unused_parameters(true); if not, "
        "check that the loss uses every output.");
  }
}

// Each rank's set of used parameters is its own; the buckets are the same all the same.
void Reducer::end_static_count() {
  for (auto& slot : slots_) slot.expected = slot.fired;
  counted_ = true;
}

std::vector<at::Tensor> Reducer::wait_for_buckets() {
  std::vector<at::Tensor> reduced;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = buckets_[b];
    or_break_off(
        [&] {
          return c10::str(
              "reducing bucket ", b, " of ", buckets_.size(), " (", bucket.bytes(),
              " bytes: ", join_names(bucket.names()), ")");
        },
        [&] { reduced.push_back(wait_for(bucket, b)); });
  }
  or_break_off(
      [] { return std::string("exchanging the ranks' status"); },
      [&] {
        if (const auto work = std::exchange(status_work_, {})) wait_for(*work, "the status");
      });
  return reduced;
}

at::Tensor Reducer::wait_for(Bucket& bucket, size_t index) {
  const auto place = c10::str("bucket ", index);
  if (const auto work = std::exchange(bucket.work, {})) wait_for(*work, place);
  const auto future = std::exchange(bucket.future, {});
  if (!future) return bucket.gradients();
  if (!future->completed() && bucket.parameters().front().is_cpu()) {
    const auto arrived = std::make_shared<std::promise<void>>();
    future->addCallback([arrived](c10::ivalue::Future&) { arrived->set_value(); });
    auto arrival = arrived->get_future();
    while (arrival.wait_for(kPatience) != std::future_status::ready) look_after_peers(place);
  }
  future->waitAndThrow();
  auto result = future->value().toTensor();
  TORCH_CHECK(
      result.numel() == bucket.gradients().numel() &&
          result.scalar_type() == bucket.gradients().scalar_type(),
      "expected the communication hook to return ", bucket.gradients().numel(), " elements of ",
      bucket.gradients().scalar_type(), ", got ", result.numel(), " of ", result.scalar_type());
  return result;
}

void Reducer::wait_for(c10d::Work& work, const std::string& place) {
  // On a GPU waiting is a matter of streams: the host does not learn when a collective ends.
  if (!parameters_.front().tensor.is_cpu()) {
    work.wait();
    return;
  }
  while (!work.isCompleted()) {
    try {
      work.wait(kPatience);
    } catch (const std::exception&) {
      // Late, or failed: the difference is whether it is over.
      if (!work.isCompleted()) look_after_peers(place);
    }
  }
  try {
    work.wait();
  } catch (const std::exception&) {
    const auto arrivals = notes_->arrivals(pass_, place);
    if (arrivals.empty()) throw;
    TORCH_CHECK_WITH(
        DistBackendError, false, text_of(std::current_exception()), "; ", arrivals, " in ", place);
  }
}

void Reducer::look_after_peers(const std::string& place) {
  notes_->report_place(pass_, place);
  const auto failure = notes_->failure(pass_);
  TORCH_CHECK(!failure, *failure);
}

void Reducer::settle_failed_pass() {
  callback_queued_ = false;
  if (group_->getSize() > 1) {
    const auto place = c10::str("failed after ", next_bucket_, " buckets");
    notes_->report_place(pass_, place);
    if (!notes_->all_arrive(pass_, place, kSettlePatience)) {
      break_off(c10::str(
          "backward pass ", pass_, " ended in an exception on rank ", group_->getRank(), " of ",
          group_->getSize(), ", and not on every rank"));
    }
    // Every rank sent as many buckets: those collectives are whole, and nobody wants them.
    for (size_t b = 0; b < next_bucket_; ++b) {
      or_break_off(
          [] { return std::string("ending a failed pass"); }, [&] { wait_for(buckets_[b], b); });
    }
    status_work_ = {};
  }
  problems_.clear();
  training_forwards_ = 0;
  ++pass_;
  phase_ = Phase::Local;
}

void Reducer::report_failed_forward() noexcept {
  if (phase_ == Phase::Broken || phase_ == Phase::Reducing) return;
  start_pass();
  phase_ = Phase::Failed;
  try {
    notes_->report_failure(
        pass_, c10::str(
                   "forward threw on rank ", group_->getRank(), " of ", group_->getSize(), ": ",
                   text_of(std::current_exception())));
  } catch (const std::exception&) {
    // Out of memory: the others will notice the silence.
  }
}

void Reducer::on_abandoned() noexcept {
  if (phase_ != Phase::Reducing) return;
  phase_ = Phase::Failed;
  callback_queued_ = false;
  try {
    notes_->report_failure(
        pass_,
        c10::str(
            "backward ended in an exception on rank ", group_->getRank(), " of ", group_->getSize(),
            ", after ", next_bucket_, " of ", buckets_.size(), " buckets were sent"));
  } catch (const std::exception&) {
  }
}

void Reducer::throw_problems() {
  start_pass();
  std::fill(used_.begin(), used_.end(), 0);
  std::string text;
  or_break_off(
      [] { return std::string("gathering the ranks' errors"); },
      [&] { text = gather_problems(std::exchange(problems_, {}), group_); });
  TORCH_CHECK(false, text);
}

void Reducer::or_break_off(c10::function_ref<std::string()> doing, c10::function_ref<void()> step) {
  try {
    step();
    return;
  } catch (...) {
    const auto cause = text_of(std::current_exception());
    // A rank that failed has said why before its connections broke.
    break_off(notes_->failure(pass_).value_or(c10::str(
        doing(), " failed on rank ", group_->getRank(), " of ", group_->getSize(), ": ", cause)));
  }
}

void Reducer::break_off(const std::string& text) {
  broken_because_ =
      "Reducer: " + notes_->report_failure(pass_, text) +
      ". The ranks are out of step: end the job, or make a new process group and wrapper.";
  phase_ = Phase::Broken;
  TORCH_CHECK_WITH(DistBackendError, false, broken_because_);
}

}  // namespace ddp
