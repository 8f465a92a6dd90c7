#include <ddp/join.h>

#include <algorithm>
#include <utility>

#include <ddp/detail/join_scope.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

#include "join_context.h"
#include "state.h"

namespace ddp {
namespace {

thread_local int joins_that_go_on = 0;

// From here on it is likely that somebody's loop does not end.
constexpr int kManyRounds = 1000;

const std::vector<Joinable*>& checked(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body) {
  DDP_CHECK_VALUE(
      !joinables.empty(), "join: expected at least one Joinable, got none. Pass the model.");
  DDP_CHECK_VALUE(body, "join: expected a body to run, got an empty function.");
  for (const auto* joinable : joinables) {
    DDP_CHECK_VALUE(joinable, "join: expected Joinables, got a null pointer.");
    DDP_CHECK_VALUE(
        joinable->join_process_group() == joinables.front()->join_process_group(),
        "join: expected all Joinables to use one process group, got different ones. Join those of "
        "each group on their own.");
    DDP_CHECK_VALUE(
        std::count(joinables.begin(), joinables.end(), joinable) == 1,
        "join: expected each Joinable once, got one twice. List it once.");
  }
  return joinables;
}

}  // namespace

JoinContext::JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)),
      options_(options),
      monitor_(monitor_of(joinables_.front()->join_process_group())) {
  for (const auto* joinable : joinables_) {
    DDP_CHECK(
        !joinable->join_context_,
        "join: expected Joinables that are in no other join, got one that is. Joins cannot be "
        "nested.");
  }
  for (auto* joinable : joinables_) joinable->join_context_ = this;
  if (!options_.throw_on_early_termination()) ++joins_that_go_on;
}

JoinContext::~JoinContext() {
  if (!options_.throw_on_early_termination()) --joins_that_go_on;
  for (auto* joinable : joinables_) joinable->join_context_ = nullptr;
}

bool detail::in_join_that_goes_on() { return joins_that_go_on > 0; }

int JoinContext::index_of(const Joinable& joinable) const {
  const auto at = std::find(joinables_.begin(), joinables_.end(), &joinable);
  return static_cast<int>(at - joinables_.begin());
}

void JoinContext::check_backward_ran() {
  monitor_->abort_on_error(
      [] { return std::string("beginning an iteration of a further object of the join"); },
      [&] {
        DDP_CHECK(
            !expects_backward_,
            "join: expected the backward pass of the model before, on which the ranks agreed in "
            "its forward pass, got the next object's iteration. Run one backward pass after each "
            "forward pass; compute metrics under torch::NoGradGuard");
      });
}

const JoinRound& JoinContext::begin_round(const RankEntry& mine) {
  auto& first = *joinables_.front();
  round_ = exchange_entries(mine, first.join_process_group(), first.join_device(), *monitor_);
  const int active = round_->active();
  if (!options_.throw_on_early_termination() || active == 0 || active == round_->size()) {
    return *round_;
  }
  ended_early_ = true;
  DDP_CHECK(
      !mine.active, "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
  DDP_CHECK(false, "Rank ", first.join_process_group()->getRank(), " exhausted all inputs.");
}

void JoinContext::run(const std::function<void()>& body) {
  try {
    body();
  } catch (const AgreedError&) {
    throw;  // all ranks throw it, and nobody waits
  } catch (...) {
    if (!ended_early_) {
      monitor_->fail(ddp::str(
          "join's body threw on ", monitor_->rank_text(), ": ", text_of(std::current_exception())));
    }
    throw;
  }
}

bool JoinContext::shadow(const std::vector<std::unique_ptr<JoinHook>>& hooks) {
  for (int rounds = 0;; ++rounds) {
    auto* model = dynamic_cast<ModelJoinHook*>(hooks.front().get());
    if (begin_round(model ? model->entry() : RankEntry{}).active() == 0) return rounds == 0;
    if (rounds == kManyRounds) {
      TORCH_WARN_ONCE(
          "join: rank ", joinables_.front()->join_process_group()->getRank(), " has taken part in ",
          kManyRounds,
          " iterations of other ranks since its own input ended. Shard the data more "
          "evenly, or check that every rank's loop ends.");
    }
    for (const auto& hook : hooks) hook->main_hook();
  }
}

void notify_join(Joinable& joinable) {
  auto* context = joinable.join_context_;
  if (!context) return;
  if (!context->counts(joinable)) return context->check_backward_ran();
  context->begin_round({/*active=*/true});
}

void join(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body,
    const JoinOptions& options) {
  checked(joinables, body);
  if (!options.enable()) return body();
  JoinContext context(joinables, options);
  std::vector<std::unique_ptr<JoinHook>> hooks;
  for (auto* joinable : joinables) hooks.push_back(joinable->join_hook(options));
  context.run([&] {
    body();
    const bool is_last_joiner = context.shadow(hooks);
    for (const auto& hook : hooks) hook->post_hook(is_last_joiner);
  });
}

}  // namespace ddp
