// A member of an elastic job that trains nothing: counts steps, and gets the count of others.
// Says that it has reached step 20. elastic_probe STEPS MILLISECONDS_A_STEP [SLOT STEP]: the
// process of that slot throws at that step.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/membership/member_link.h"

namespace {

using namespace ddp::membership;
using Stage = Member::Stage;

struct Training {
  int64_t steps;
  std::chrono::milliseconds pause;
  int throwing_slot;
  int64_t throwing_step;
  int64_t applied = 0;
  Holding holding = Holding::None;
};

void enter(MemberLink& link, Training& training) {
  link.with([&](Member& member, Member::Time) {
    const Form& form = member.form();
    if (training.holding == Holding::None) training.applied = form.applied;
    if (training.applied < form.applied) training.applied = form.applied;
    training.holding = Holding::Whole;
    size_t rank = 0;
    while (form.members[rank].id != member.id()) ++rank;
    std::printf(
        "slot %d pid %d: generation %lld, rank %zu of %zu, step %lld\n", form.members[rank].slot,
        static_cast<int>(::getpid()), static_cast<long long>(form.generation), rank,
        form.members.size(), static_cast<long long>(training.applied));
    member.met(form.generation);
    member.entered(form.generation);
  });
}

/// \return whether the user's code throws.
bool step(MemberLink& link, Training& training) {
  std::this_thread::sleep_for(training.pause);
  return link.with([&](Member& member, Member::Time now) {
    if (member.stage() != Stage::Training) return false;
    if (training.applied >= training.steps) {
      member.done(now, member.generation());
      return false;
    }
    if (++training.applied == 20) std::printf("reached step 20\n");
    const bool throws =
        member.you()->slot == training.throwing_slot && training.applied >= training.throwing_step;
    if (throws) {
      member.threw(training.applied, "out of memory");
    } else if (member.change_is_wanted()) {
      member.pause(now, member.generation());
    }
    return throws;
  });
}

int train(MemberLink& link, Training& training) {
  for (;;) {
    const auto stage = link.with([](Member& member, Member::Time) { return member.stage(); });
    if (stage == Stage::Asked) {
      link.with([&](Member& member, Member::Time) {
        member.report(member.generation(), training.applied, 0, training.holding);
      });
    } else if (stage == Stage::Placed) {
      link.with([](Member& member, Member::Time) {
        const bool makes_store = member.form().members.front().id == member.id();
        if (makes_store && member.store_address().empty()) member.store("h:1");
      });
      link.wait_until([](const Member& member) {
        return member.stage() != Stage::Placed || !member.store_address().empty();
      });
      enter(link, training);
    } else if (stage == Stage::Training) {
      if (step(link, training)) return 1;
    } else if (stage == Stage::Over) {
      const auto end = link.with([](Member& member, Member::Time) { return member.end(); });
      const char* names[] = {"", "left", "fenced", "failed"};
      std::printf(
          "%s at step %lld: %s\n", names[static_cast<int>(end.how)],
          static_cast<long long>(training.applied), end.why.c_str());
      return end.how == Member::Ending::Left ? 0 : 3 + static_cast<int>(end.how);
    } else {
      link.wait_until([stage](const Member& member) { return member.stage() != stage; });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* coordinator = std::getenv("DDP_COORDINATOR");
  const char* slot = std::getenv("DDP_SLOT");
  if (argc < 3 || coordinator == nullptr) return 2;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Training training = {std::atoll(argv[1]), std::chrono::milliseconds(std::atoi(argv[2])), -1, 0};
  if (argc > 4) training.throwing_slot = std::atoi(argv[3]);
  if (argc > 4) training.throwing_step = std::atoll(argv[4]);
  MemberLink link(parse_address(coordinator), slot ? std::atoi(slot) : -1, [](const auto&) {});
  link.wait_until([](const Member& member) { return member.stage() != Stage::Starting; });
  link.with([](Member& member, Member::Time) { member.ready(); });
  return train(link, training);
}
