#include <ddp/main_first.h>

#include <atomic>
#include <memory>
#include <stdexcept>

#include <ddp/collectives.h>

#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

struct DiskFull : std::runtime_error {
  using runtime_error::runtime_error;
};

}  // namespace

TEST_CASE("main_first runs the function on rank 0 before the others", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  CAPTURE(size);
  std::atomic<int> runs{0};
  std::atomic<bool> downloaded{false};
  const auto found = run_ranks<int>(size, [&](const Rank& self) {
    return ddp::main_first(
        [&] {
          ++runs;
          if (!ddp::is_main(self.group)) return downloaded ? 1 : 0;
          // Gives the other ranks time to run first, if they could.
          for (int i = 0; i < 1000; ++i) std::this_thread::yield();
          downloaded = true;
          return 1;
        },
        self.group);
  });
  CHECK(found == std::vector<int>(static_cast<size_t>(size), 1));
  CHECK(runs == size);
}

TEST_CASE("main_first returns what the function returns, by value", "[comm][ranks]") {
  const auto results = run_ranks<std::string>(2, [](const Rank& self) {
    std::string text = "rank " + std::to_string(self.rank);
    const auto pointer = ddp::main_first(
        [&] { return std::make_unique<std::string>(text); }, self.group);  // cannot be copied
    auto copy = ddp::main_first([&]() -> std::string& { return text; }, self.group);
    copy += "!";
    bool ran = false;
    ddp::main_first([&] { ran = true; }, self.group);
    return *pointer + ", " + copy + ", " + text + (ran ? ", ran" : "");
  });
  CHECK(
      results ==
      std::vector<std::string>{"rank 0, rank 0!, rank 0, ran", "rank 1, rank 1!, rank 1, ran"});
}

TEST_CASE(
    "after an exception of rank 0 the other ranks do not run the function",
    "[comm][ranks][errors]") {
  std::atomic<int> runs{0};
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    std::string error = "none";
    try {
      ddp::main_first(
          [&] {
            ++runs;
            throw DiskFull("disk full");
          },
          self.group);
    } catch (const DiskFull& own) {
      error = std::string("own: ") + own.what();
    } catch (const c10::Error& other) {
      error = other.what_without_backtrace();
    }
    ddp::barrier(self.group);  // the group stays usable
    TORCH_CHECK(false, error);
  });
  CHECK(runs == 1);
  CHECK_THAT(errors[0], ContainsText("own: disk full"));
  for (const int rank : {1, 2}) {
    CHECK_THAT(
        errors[static_cast<size_t>(rank)],
        ContainsText("main_first: expected the function to return on rank 0 before the other ranks "
                     "run it, got an exception on rank 0 of 3: disk full"));
  }
}

TEST_CASE("an exception of a later run reaches every rank", "[comm][ranks][errors]") {
  std::atomic<int> runs{0};
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    ddp::main_first(
        [&] {
          ++runs;
          if (self.rank == 1) throw DiskFull("");
          if (self.rank == 2) throw 2;  // no std::exception
        },
        self.group);
  });
  CHECK(runs == 3);
  const auto expected = ContainsText("to return on every rank, got an exception on rank 1 of 3: ");
  CHECK_THAT(errors[0], expected);
  CHECK_THAT(errors[2], expected);
}

TEST_CASE("is_main is rank 0 of the group", "[comm][ranks]") {
  const auto mains = run_ranks<int>(3, [](const Rank& self) { return ddp::is_main(self.group); });
  CHECK(mains == std::vector<int>{1, 0, 0});
}
