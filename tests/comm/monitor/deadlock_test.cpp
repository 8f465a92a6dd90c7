// Ranks that wait for each other in different groups throw within seconds, naming their waits.
// Ranks that are late, or that have made their calls in another order, cause no error.
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/ones.h>
#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/internal/text.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::deadlock_test {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using Op = c10d::ReduceOp;

// Five seconds, plus a margin for a busy machine.
constexpr double kBound = 20;
// Longer than the ranks that are not late need to find a deadlock.
constexpr auto kLate = 5500ms;

void be_late() { std::this_thread::sleep_for(kLate); }

void sum(const ProcessGroup& group, Op op = Op::SUM) {
  auto tensor = at::ones({8});
  all_reduce(tensor, op, group);
  const float expected = op == Op::SUM ? static_cast<float>(group->getSize()) : 1;
  TORCH_CHECK(tensor[7].item<float>() == expected, "a wrong sum");
}

void get_from(int src, const ProcessGroup& group) {
  auto tensor = at::ones({8});
  broadcast(tensor, src, group);
}

/// Calls of the ranks, and what the error has, in order of the ranks' waits; nothing for none.
struct Scene {
  std::string what;
  int size;
  std::function<void(const Rank&)> body;
  std::vector<std::string> texts;
};

void call_in_order(const ProcessGroup& first, const ProcessGroup& second) {
  sum(first);
  sum(second);
}

void cross_in_mesh(const Rank& self) {
  const auto mesh = init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
  const auto dp = mesh.group("dp"), tp = mesh.group("tp");
  for (int i = 0; i < 3; ++i) call_in_order(dp, tp);
  const bool is_odd = self.rank == 1 || self.rank == 2;
  is_odd ? call_in_order(dp, tp) : call_in_order(tp, dp);
}

/// In three groups of two; the last rank is late where `ends`.
void chain(const Rank& self, bool ends) {
  const auto a = new_group({0, 1}, self.group);
  const auto b = new_group({1, 2}, self.group);
  const auto c = new_group({0, 2}, self.group);
  if (self.rank == 0) call_in_order(a, c);
  if (self.rank == 1) call_in_order(b, a);
  if (self.rank == 2 && ends) be_late();
  if (self.rank == 2) ends ? call_in_order(b, c) : call_in_order(c, b);
}

/// In two groups of all ranks.
template <typename Call>
void cross(const Rank& self, const Call& call) {
  const auto a = split_group(0, 0, self.group), b = split_group(0, 0, self.group);
  call(self.rank == 0 ? a : b);
  call(self.rank == 0 ? b : a);
}

void start_in_two_orders(const Rank& self) {
  const auto a = split_group(0, 0, self.group), b = split_group(0, 0, self.group);
  auto first = at::ones({8}), second = at::ones({8});
  if (self.rank == 2) be_late();
  const auto one = all_reduce_async(first, Op::SUM, self.rank == 0 ? a : b);
  const auto two = all_reduce_async(second, Op::SUM, self.rank == 0 ? b : a);
  one->wait();
  two->wait();
}

/// Rank 0 waits for rank 1 in a, and rank 1 in b for rank 0, whose second thread comes there.
void come_from_a_thread(const Rank& self) {
  const auto a = split_group(0, 0, self.group), b = split_group(0, 0, self.group);
  if (self.rank == 1) {
    call_in_order(b, b);
    return sum(a);
  }
  std::promise<void> called;
  auto second = std::async(std::launch::async, [&] {
    const auto error = error_of([&] { sum(b); });
    called.set_value();
    TORCH_CHECK(error.empty(), error);
    be_late();
    sum(b);
  });
  called.get_future().wait();
  sum(a);  // if it throws, `second` waits for its thread
  second.get();
}

/// Rank 0 waits in a and, on another thread, in b; rank 1 waits in c.
void wait_on_two_threads(const Rank& self) {
  const auto a = split_group(0, 0, self.group), b = split_group(0, 0, self.group);
  const auto c = split_group(0, 0, self.group);
  if (self.rank == 1) return call_in_order(c, a);
  const auto other = std::async(std::launch::async, [&] { sum(b); });
  call_in_order(a, c);
}

std::string wait_text(
    int rank, const std::string& place, const std::string& call, const std::string& group,
    int other) {
  return ddp::str(
      "rank ", rank, " of ", place, " waits in call ", call, " of process group \"", group, ")",
      " for rank ", other);
}

std::vector<Scene> scenes() {
  const auto in = [](const std::string& group,
                     const std::string& call = "all_reduce of 8 x Float, SUM") {
    return group + "\" (" + call;
  };
  return {
      {"a mesh",
       4,
       cross_in_mesh,
       {wait_text(0, "4 (dp 0, tp 0)", "3", in("tp [0, 1]"), 1),
        wait_text(1, "4 (dp 0, tp 1)", "3", in("dp [1, 3]"), 3),
        wait_text(3, "4 (dp 1, tp 1)", "3", in("tp [2, 3]"), 2),
        wait_text(2, "4 (dp 1, tp 0)", "3", in("dp [0, 2]"), 0)}},
      {"three groups of two",
       3,
       [](const Rank& self) { chain(self, false); },
       {wait_text(0, "3 (rank 0 of group [0, 1])", "0", in("group [0, 1]"), 1),
        wait_text(1, "3 (rank 0 of group [1, 2])", "0", in("group [1, 2]"), 2),
        wait_text(2, "3 (rank 1 of group [0, 2])", "0", in("group [0, 2]"), 0)}},
      // Over Gloo a handle of two parts.
      {"averages",
       2,
       [](const Rank& self) { cross(self, [](const auto& g) { sum(g, Op::AVG); }); },
       {"rank 0 of 2 waits in call 0 of process group \"group [0, 1]\" (all_reduce of 8 x Float, ",
        " for rank 1; rank 1 of 2 waits in call 0 of "}},
      {"broadcasts",
       2,
       [](const Rank& self) {
         cross(self, [&](const auto& group) { get_from(1 - self.rank, group); });
       },
       {wait_text(0, "2", "0", in("group [0, 1]", "broadcast of 8 x Float from rank 1"), 1),
        wait_text(1, "2", "0", in("group [0, 1]", "broadcast of 8 x Float from rank 0"), 0)}},
      {"two threads",
       2,
       wait_on_two_threads,
       {wait_text(1, "2", "0", in("group [0, 1]"), 0), ": they wait for each other"}},
      {"a late rank",
       2,
       [](const Rank& self) {
         if (self.rank == 1) be_late();
         sum(self.group);
       },
       {}},
      {"a chain", 3, [](const Rank& self) { chain(self, true); }, {}},
      {"handles in two orders", 3, start_in_two_orders, {}},
      {"a thread that comes", 2, come_from_a_thread, {}}};
}

std::vector<TimedError> play(const Scene& scene) {
  return run_ranks<TimedError>(
      scene.size,
      [&](const Rank& self) {
        auto error = timed_error_of([&] { scene.body(self); });
        self.wait_until_others_end();
        return error;
      },
      kLongTimeout);
}

}  // namespace

TEST_CASE(
    "ranks that wait for each other in different groups throw, and late ranks do not",
    "[comm][ranks][errors][monitor]") {
  // All scenes run at the same time, because their ranks wait and do not compute.
  const auto all = scenes();
  std::vector<std::future<std::vector<TimedError>>> played;
  for (const auto& scene : all) {
    played.push_back(std::async(std::launch::async, [&scene] { return play(scene); }));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& scene = all[i];
    CAPTURE(scene.what);
    const auto errors = played[i].get();
    for (const auto& [error, seconds] : errors) {
      CAPTURE(error, seconds);
      CHECK(error.empty() == scene.texts.empty());
      if (error.empty()) continue;
      CHECK_THAT(
          error, ContainsText("deadlock: ") &&
                     ContainsText(": they wait for each other. Make the collectives of all ranks "
                                  "in the same order across groups. "));
      size_t from = 0;
      for (const auto& text : scene.texts) {
        CAPTURE(text);
        from = error.find(text, from);
        CHECK(from != std::string::npos);
      }
      CHECK(seconds < kBound);
    }
  }
}

}  // namespace ddp::deadlock_test
