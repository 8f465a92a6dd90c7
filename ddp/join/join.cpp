#include <ddp/join.h>

#include <algorithm>

#include <ddp/internal/check.h>

#include "join/join_context.h"

namespace ddp {
namespace {

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

void notify_join(Joinable& joinable) {
  if (auto* context = joinable.join_context_) {
    context->begin_round(joinable, JoinPlace::Event::Iteration, {});
  }
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
