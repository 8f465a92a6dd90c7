// What goes wrong: gradients that are missing, passes that end early, ranks in trouble.
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/error_text.h>
#include <ddp/internal/capabilities.h>
#include <ddp/reducer.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "bucket.h"
#include "forward_outputs.h"
#include "graph_search.h"
#include "past_pass.h"
#include "peer_notes.h"
#include "problem_report.h"

namespace ddp {
namespace {

constexpr const char* kOutOfStep =
    ". The ranks are out of step: end the job, or make a new process group and wrapper.";

constexpr const char* kUnused = "not used in forward";
constexpr const char* kLeftOut = "its output is not in the loss";

}  // namespace

std::string Reducer::rank_text() const {
  return c10::str("rank ", group_->getRank(), " of ", group_->getSize());
}

// Why the gradient of a parameter does not come to its hook any more; "" when it could.
std::string Reducer::why_detached(size_t index) const {
  const auto& tensor = parameters_[index].tensor;
  // Autograd gives a parameter a new accumulator when its data changes its type or device.
  if (torch::autograd::impl::try_get_grad_accumulator(tensor) != accumulators_[index]) {
    return c10::str(
        "moved to ", tensor.scalar_type(), " on ", tensor.device(),
        " after the module was wrapped; wrap it again");
  }
  return explain_missing_ ? explain_missing_(parameters_[index]) : std::string();
}

std::string Reducer::why_missing(size_t index, const std::vector<char>& reached) const {
  const auto detached = why_detached(index);
  if (!detached.empty() || reached.empty()) return detached;
  return reached[index] ? kLeftOut : kUnused;
}

void Reducer::note_missing() {
  std::vector<char> reached;  // by parameter, from the outputs; empty when they are not known
  const auto nodes = outputs_->nodes();
  if (!nodes.empty()) {
    std::vector<torch::autograd::Node*> roots;
    for (const auto& node : nodes) roots.push_back(node.get());
    reached = GraphSearch(accumulators_).reachable(roots);
  }
  std::vector<std::string> missing;
  bool all_unused = true, all_left_out = true;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].ready) continue;
    // Names beyond those that are listed need no reason, which takes a look at the whole module.
    const auto why = missing.size() < kMostNames ? why_missing(i, reached) : std::string();
    all_unused = all_unused && why == kUnused;
    all_left_out = all_left_out && why == kLeftOut;
    missing.push_back(parameters_[i].name + (why.empty() ? "" : ": " + why));
  }
  if (missing.empty()) return;
  std::string remedy =
      "If a forward pass may skip parameters, set find_unused_parameters(true); if not, check that "
      "the loss uses every output.";
  if (all_unused)
    remedy = "If a forward pass may skip parameters, set find_unused_parameters(true).";
  if (all_left_out) {
    remedy = "Use every output of forward in the loss, or set find_unused_parameters(true).";
  }
  if (options_.static_graph()) {
    remedy =
        "They had some in the first iteration, and static_graph set to true needs the same graph "
        "in each.";
  }
  report_problem(
      c10::str(
          "backward ended without gradients for ", missing.size(), " of ", parameters_.size(),
          " parameters (", join_names(missing), ")"),
      remedy);
}

// Where parameters may be without gradient, one that can get none any more would go unnoticed.
void Reducer::note_detached() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    // Frozen is a way of being unused.
    if (slots_[i].fired > 0 || !parameters_[i].tensor.requires_grad()) continue;
    if (std::exchange(known_unused_[i], 1)) continue;
    const auto why = why_detached(i);
    if (!why.empty()) {
      report_problem(
          c10::str("the gradient of ", parameters_[i].name, " is not averaged: it was ", why),
          "Until then the ranks' models drift apart.");
    }
  }
}

Whereabouts Reducer::whereabouts(const std::string& place) const {
  return {pass_, training_forwards_, phase_ == Phase::Reducing, place};
}

// `look` at the notes of the passes that another rank may be in: who runs ahead is through with one
// that the others have not come to the end of.
std::optional<std::string> Reducer::look_up(NoteOfPass look) const {
  std::optional<std::string> note;
  if (past_) note = (*notes_.*look)(past_->number);
  return note ? note : (*notes_.*look)(pass_);
}

void Reducer::look_after_peers(const std::string& place) {
  const auto here = whereabouts(place);
  notes_->report(here);
  // All ranks know of the failure that they are getting over.
  const auto failure = phase_ == Phase::Failed ? std::nullopt : look_up(&PeerNotes::failure);
  TORCH_CHECK(!failure, *failure);
  const auto gone = phase_ == Phase::Reducing ? notes_->ended_before(pass_)
                                              : notes_->ended_before(pass_, waits_before_forward_);
  TORCH_CHECK(!gone || gone->because.empty(), gone->because);
  TORCH_CHECK(
      !gone, "rank ", gone->rank, " of ", group_->getSize(), " ended its training after ",
      pass_ - 1, " reduced backward passes or less, while ", rank_text(), " is in number ", pass_,
      ". Every rank has to run as many");
  const auto mismatch = notes_->mismatch(here);
  TORCH_CHECK(mismatch.empty(), mismatch);
}

// `wait` waits a little, and says whether that is over.
void Reducer::look_out_until(
    c10::function_ref<bool()> wait, c10::function_ref<std::string()> place) {
  bool noted = false;
  while (!wait()) {
    look_after_peers(place());
    noted = true;
  }
  // Or the others would take it for what this rank does now.
  if (noted) notes_->report_passed(whereabouts(place()));
}

void Reducer::settle() {
  if (torch::autograd::get_current_node()) return;
  TORCH_CHECK_WITH(DistBackendError, phase_ != Phase::Broken, broken_because_);
  if (phase_ == Phase::Reducing || phase_ == Phase::Failed) settle_failed_pass();
}

std::string Reducer::failed_place() const {
  return c10::str("failed after ", next_bucket_.load(), " buckets", failed_again_);
}

void Reducer::settle_failed_pass() {
  // An autograd thread may still be about to say that the pass threw.
  for (int i = 0; i < 100 && phase_ == Phase::Reducing; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool threw = phase_ == Phase::Failed;
  callback_queued_ = false;
  const auto failed_pass = pass_;
  if (group_->getSize() > 1) {
    const auto place = failed_place();
    notes_->report(whereabouts(place));
    const auto difference = notes_->fail_alike(pass_, place);
    if (!difference.empty()) {
      break_off(c10::str(
          "backward pass ", pass_, " ended in an exception on ", rank_text(), ", and ",
          difference));
    }
    // Every rank sent as many buckets: those collectives are whole, and nobody wants them.
    for (size_t b = 0; b < next_bucket_; ++b) {
      or_break_off(
          [] { return std::string("ending a failed pass"); }, [&] { wait_for(buckets_[b], b); });
    }
    status_work_ = {};
  }
  failed_again_.clear();
  problems_.clear();
  works_.clear();
  std::fill(used_.begin(), used_.end(), 0);
  training_forwards_ = 0;
  ++pass_;
  phase_ = Phase::Local;
  TORCH_CHECK(
      threw, "Reducer: backward pass ", failed_pass, " ended on ", rank_text(),
      " before all gradients were there, inside another backward pass, so none was averaged. "
      "Return from forward everything that the loss is made of.");
}

void Reducer::report_failed_forward(bool training) noexcept {
  if (training || reduces_in_evaluation_) return report_failure("forward");
  try {
    notes_->report_suspicion(
        pass_, c10::str("forward threw on ", rank_text(), ": ", text_of(std::current_exception())));
  } catch (const std::exception&) {
    // Out of memory: the others will notice the silence.
  }
}

void Reducer::report_failure(const std::string& where) noexcept {
  if (phase_ == Phase::Broken || phase_ == Phase::Reducing) return;
  try {
    if (phase_ == Phase::Failed) {
      // It has said so, and what it sent is still to be waited for. But the others may be about to
      // get over that.
      failed_again_ = ", and then " + where + " threw";
      notes_->report_failed(pass_, failed_place());
      return;
    }
    start_pass();
    phase_ = Phase::Failed;
    notes_->report_failure(
        pass_, c10::str(where, " threw on ", rank_text(), ": ", text_of(std::current_exception())));
  } catch (const std::exception&) {
  }
}

void Reducer::on_abandoned(int64_t pass, const std::exception_ptr& cause) noexcept {
  if (phase_ != Phase::Reducing || pass != pass_) return;
  phase_ = Phase::Failed;
  callback_queued_ = false;
  try {
    notes_->report_failure(
        pass_, c10::str(
                   "backward threw on ", rank_text(), ", after ", next_bucket_.load(), " of ",
                   buckets_.size(), " buckets were sent", cause ? ": " + text_of(cause) : ""));
  } catch (const std::exception&) {
  }
}

void Reducer::throw_problems(std::vector<Problem> met) {
  start_pass();
  std::fill(used_.begin(), used_.end(), 0);
  std::string text;
  or_break_off(
      [] { return std::string("gathering the ranks' errors"); },
      [&] {
        text = gather_problems(met, group_, [&](c10d::Work& work) {
          wait_for(work, [] { return std::string("the ranks' errors"); });
        });
      });
  TORCH_CHECK(false, text);
}

void Reducer::or_break_off(c10::function_ref<std::string()> doing, c10::function_ref<void()> step) {
  try {
    step();
    return;
  } catch (...) {
    const auto cause = text_of(std::current_exception());
    // A rank that failed has said why before its connections broke.
    auto known = look_up(&PeerNotes::failure);
    if (!known) known = look_up(&PeerNotes::suspicion);
    // It may have done so in a pass that went well here.
    if (!known) {
      const auto gone = notes_->ended_before(pass_);
      if (gone && !gone->because.empty()) known = gone->because;
    }
    break_off(known.value_or(c10::str(doing(), " failed on ", rank_text(), ": ", cause)));
  }
}

void Reducer::break_off(const std::string& text) {
  auto because = notes_->report_failure(pass_, text);
  if (!because.empty() && because.back() == '.') because.pop_back();  // a backend's whole sentence
  broken_because_ = "Reducer: " + because + kOutOfStep;
  phase_ = Phase::Broken;
  notes_->report_end(pass_, waits_before_forward_, because);
  abort_group();
  TORCH_CHECK_WITH(DistBackendError, false, broken_because_);
}

// What is under way would hold up the end of the group until its timeout. What is on a device
// NCCL's own watchdog looks after, and nothing holds up a group of one.
void Reducer::abort_group() const noexcept {
  if (group_->getSize() == 1) return;
  try {
    const auto device = parameters_.front().tensor.device();
    if (capabilities_of(*group_, device).waits_on_stream) return;
    group_->getBackend(device.type())->abort();
  } catch (const std::exception&) {
    // Of a backend of the user's own. Why the group broke matters more.
  }
}

}  // namespace ddp
