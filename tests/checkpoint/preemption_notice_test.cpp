// One rank is told to leave, and all leave in the same step.
#include <ddp/preemption_notice.h>

#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::PreemptionNotice;

constexpr int kCalls = 12;

// A rank that listens to nothing, so that only others can tell it.
ddp::PreemptionNoticeOptions notice_options_of(const Rank& self) {
  return ddp::PreemptionNoticeOptions().signals({}).group(self.group);
}

// Returns in which of some steps requested() was true for the first time; -1: in none. `act` gets
// the number of each step before.
template <typename Act>
int step_of_notice(PreemptionNotice& notice, const Act& act) {
  int first = -1;
  for (int step = 1; step <= kCalls; ++step) {
    act(step);
    const bool is_requested = notice.requested();
    if (is_requested && first < 0) first = step;
    if (!is_requested && first >= 0) return -2;  // it has to stay true
  }
  return first;
}

void (*handler_of(int signal))(int) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler;
}

}  // namespace

TEST_CASE("a signal to one rank is a notice to all in the same step", "[preemption][ranks]") {
  const auto steps = run_ranks<int>(3, [](const Rank& self) {
    auto options = notice_options_of(self);
    if (self.rank == 2) options.signals({SIGUSR1});
    PreemptionNotice notice(options);
    return step_of_notice(notice, [&](int step) {
      if (self.rank == 2 && step == 4) std::raise(SIGUSR1);
    });
  });
  CHECK(steps == std::vector<int>{4, 4, 4});
}

TEST_CASE("signals in different steps are one notice, of the first", "[preemption][ranks]") {
  const auto steps = run_ranks<int>(2, [](const Rank& self) {
    const int signal = self.rank == 0 ? SIGUSR1 : SIGUSR2;
    PreemptionNotice notice(notice_options_of(self).signals({signal}));
    return step_of_notice(notice, [&](int step) {
      if (step == (self.rank == 0 ? 7 : 3)) std::raise(signal);
    });
  });
  CHECK(steps == std::vector<int>{3, 3});
}

TEST_CASE("a file that one rank sees is a notice", "[preemption][ranks]") {
  const TemporaryFolder folder;
  const auto steps = run_ranks<int>(2, [&](const Rank& self) {
    const auto path = folder.file(std::to_string(self.rank));
    PreemptionNotice notice(notice_options_of(self).path(path));
    return step_of_notice(notice, [&](int step) {
      if (self.rank == 1 && step == 5) std::ofstream(path) << "";
    });
  });
  CHECK(steps == std::vector<int>{5, 5});
}

TEST_CASE("the ranks ask each other in every n-th call only", "[preemption][ranks]") {
  const auto steps = run_ranks<int>(2, [](const Rank& self) {
    auto options = notice_options_of(self).check_every(4);
    if (self.rank == 0) options.signals({SIGUSR1});
    PreemptionNotice notice(options);
    const int step = step_of_notice(notice, [&](int at) {
      if (self.rank == 0 && at == 5) std::raise(SIGUSR1);
    });
    // After three calls one rank alone would wait in the fourth.
    PreemptionNotice other(notice_options_of(self).check_every(4));
    for (int call = 0; self.rank == 0 && call < 3; ++call) (void)other.requested();
    return step;
  });
  CHECK(steps == std::vector<int>{8, 8});
}

TEST_CASE("without a notice nobody leaves", "[preemption][ranks]") {
  const auto steps = run_ranks<int>(2, [](const Rank& self) {
    PreemptionNotice notice(notice_options_of(self).signals({SIGUSR1, SIGUSR2}));
    return step_of_notice(notice, [](int) {});
  });
  CHECK(steps == std::vector<int>{-1, -1});
}

TEST_CASE("the last notice brings back the handlers that were there", "[preemption][pure]") {
  const auto before = std::signal(SIGUSR1, SIG_IGN);
  const auto term = handler_of(SIGTERM);
  {
    auto first = std::make_unique<PreemptionNotice>();
    CHECK(handler_of(SIGUSR1) != SIG_IGN);
    CHECK(handler_of(SIGTERM) != term);
    const PreemptionNotice second(ddp::PreemptionNoticeOptions().signals({SIGUSR1}));
    first.reset();
    CHECK(handler_of(SIGUSR1) != SIG_IGN);
    CHECK(handler_of(SIGTERM) == term);
  }
  CHECK(handler_of(SIGUSR1) == SIG_IGN);
  {
    const PreemptionNotice notice(ddp::PreemptionNoticeOptions().signals({SIGUSR1}));
    std::signal(SIGUSR1, SIG_DFL);  // the program's own, set after it, stays
  }
  CHECK(handler_of(SIGUSR1) == SIG_DFL);
  std::signal(SIGUSR1, before);
}

TEST_CASE("a signal of an earlier notice is none for the next one", "[preemption][ranks]") {
  const auto steps = run_ranks<int>(1, [](const Rank& self) {
    const auto options = notice_options_of(self).signals({SIGUSR1});
    {
      PreemptionNotice notice(options);
      std::raise(SIGUSR1);
      if (!notice.requested()) return -3;
    }
    PreemptionNotice notice(options);
    return step_of_notice(notice, [](int) {});
  });
  CHECK(steps == std::vector<int>{-1});
}

TEST_CASE("wrong options of a notice are errors", "[preemption][errors][pure]") {
  using Options = ddp::PreemptionNoticeOptions;
  const auto refused = [](const Options& options) {
    return error_of([&] { const PreemptionNotice notice(options); });
  };
  const auto term = handler_of(SIGTERM);
  CHECK_THAT(
      refused(Options().signals({SIGTERM, SIGKILL})),
      ContainsText("PreemptionNoticeOptions: expected signals that can be handled, got 9 ("));
  CHECK(handler_of(SIGTERM) == term);
  CHECK_THAT(refused(Options().signals({4711})), ContainsText("got 4711 ("));
  CHECK_THAT(
      refused(Options().check_every(0)), ContainsText("expected check_every of at least 1, got 0"));
  for (const int code : {0, 256}) {
    CHECK_THAT(
        refused(Options().exit_code(code)),
        ContainsText("expected an exit_code from 1 to 255, got " + std::to_string(code)));
  }
  CHECK(PreemptionNotice(Options().exit_code(75)).exit_code() == 75);
  CHECK(PreemptionNotice().exit_code() == 143);
}
