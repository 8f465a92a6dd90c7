#include "join/join_context.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/zero.h>
#include <torch/nn/module.h>

#include "join/model_join_hook.h"

namespace ddp {
namespace {

// The innermost join whose body this thread runs.
thread_local JoinContext* current_join = nullptr;

// After so many rounds without input, and more than this rank had with input, it is likely that
// some rank's loop does not end.
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

void check_optimizers(const std::vector<torch::optim::Optimizer*>& optimizers) {
  for (auto* optimizer : optimizers) {
    DDP_CHECK_VALUE(
        optimizer,
        "JoinOptions::optimizers: expected optimizers, got a null pointer. Leave it out.");
    DDP_CHECK_VALUE(
        dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer) == nullptr,
        "JoinOptions::optimizers: expected optimizers whose whole state each rank has, got a "
        "ZeroRedundancyOptimizer, which ranks without input step with the others. Leave it out; "
        "without overlap it is one of the objects: ddp::join({model.get(), &optimizer}, body).");
  }
}

/// Handles of the modules among them, where they are held by any.
std::vector<std::shared_ptr<torch::nn::Module>> handles_of_modules(
    const std::vector<Joinable*>& joinables) {
  std::vector<std::shared_ptr<torch::nn::Module>> handles;
  for (auto* joinable : joinables) {
    auto* module = dynamic_cast<torch::nn::Module*>(joinable);
    if (module) handles.push_back(module->weak_from_this().lock());
  }
  return handles;
}

}  // namespace

JoinContext::JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)),
      options_(options),
      monitor_(monitor_of(joinables_.front()->join_process_group())),
      outer_(current_join) {
  // A rank without input in the outer join would take the inner join's rounds for the outer one's.
  DDP_CHECK(
      !find(outer_, first().join_process_group(), /*only_uneven=*/false),
      "join: expected one join of a process group at a time, got one in the body of another on ",
      monitor_->rank_text(), ". Joins cannot be nested: join all objects in one.");
  for (const auto* joinable : joinables_) {
    DDP_CHECK(
        !joinable->join_context_,
        "join: expected Joinables that are in no other join, got one that is. Joins cannot be "
        "nested.");
  }
  for (auto* joinable : joinables_) joinable->join_context_ = this;
  current_join = this;
}

JoinContext::~JoinContext() {
  current_join = outer_;
  for (auto* joinable : joinables_) joinable->join_context_ = nullptr;
}

JoinContext* JoinContext::find(JoinContext* from, const ProcessGroup& group, bool only_uneven) {
  for (auto* join = from; join; join = join->outer_) {
    if (only_uneven && join->options_.throw_on_early_termination()) continue;
    if (!group || join->first().join_process_group() == group) return join;
  }
  return nullptr;
}

bool JoinContext::is_in_uneven_join(const ProcessGroup& group) {
  return find(current_join, group, /*only_uneven=*/true);
}

bool detail::in_uneven_join() { return JoinContext::is_in_uneven_join(nullptr); }

bool JoinContext::take_turn(const Joinable& joinable) {
  const Joinable* has_turn = nullptr;
  return turn_.compare_exchange_strong(has_turn, &joinable) || has_turn == &joinable;
}

const JoinRound& JoinContext::begin_round(
    const Joinable& joinable, JoinPlace::Event event, RankStatus mine) {
  const auto at = std::find(joinables_.begin(), joinables_.end(), &joinable);
  ++own_rounds_;
  mine.active = true;
  mine.place = {static_cast<int>(at - joinables_.begin()), event};
  return begin_round(mine);
}

const JoinRound& JoinContext::begin_round(const RankStatus& mine) {
  round_ = all_reduce_status(mine, first().join_process_group(), first().join_device(), *monitor_);
  const int active = round_->active();
  if (!options_.throw_on_early_termination() || active == 0 || active == round_->size()) {
    return *round_;
  }
  // All ranks had input in forward, so one without input now has left out its backward pass.
  if (round_->place().event == JoinPlace::Event::Backward) {
    monitor_->throw_agreed(round_->different_places(/*with_ended=*/true));
  }
  ended_early_ = true;
  DDP_CHECK(
      !mine.active, "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
  DDP_CHECK(false, "Rank ", first().join_process_group()->getRank(), " exhausted all inputs.");
}

void JoinContext::run(const std::function<void()>& body) {
  try {
    body();
  } catch (const AgreedError&) {
    throw;  // all ranks throw it, so no rank waits
  } catch (...) {
    if (!ended_early_) {
      monitor_->fail(ddp::str(
          "join's body threw on ", monitor_->rank_text(), ": ", text_of(std::current_exception())));
    }
    throw;
  }
}

bool JoinContext::shadow(const std::vector<std::unique_ptr<JoinHook>>& hooks) {
  auto* model = has_several() ? nullptr : dynamic_cast<ModelJoinHook*>(hooks.front().get());
  for (int rounds = 0;; ++rounds) {
    if (begin_round(model ? model->local_status() : RankStatus{}).active() == 0) return rounds == 0;
    if (rounds == std::max(kManyRounds, own_rounds_ + 1)) {
      TORCH_WARN_ONCE(
          "join: rank ", first().join_process_group()->getRank(), " has taken part in ", rounds,
          " iterations of other ranks since its own input ended, after ", own_rounds_,
          " of its own. Shard the data more evenly, or check that every rank's loop ends.");
    }
    hooks[round_->place().joinable]->main_hook();
  }
}

void notify_join(Joinable& joinable) {
  if (auto* context = joinable.join_context_) {
    context->begin_round(joinable, JoinPlace::Event::Iteration, {});
  }
}

void join(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body,
    const JoinOptions& options) {
  checked(joinables, body);
  check_optimizers(options.optimizers());
  if (!options.enable()) return body();
  const auto alive = handles_of_modules(joinables);  // a body may drop the caller's
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
