// Ranks as threads of the test's process, over one HashStore.
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/process_group.h>

namespace ddp::testing {

/// The view of one rank of a test.
struct Rank {
  int rank;
  int size;
  ProcessGroup group;                     // on the loopback device
  c10::intrusive_ptr<c10d::Store> store;  // shared by all ranks of the test
  /// Waits until the others have ended, for a rank that lives, but calls no collectives.
  std::function<void()> wait_until_others_end = nullptr;
};

struct RanksOptions {
  /// The timeout of every store and collective call: a lost rank fails the test in this time.
  std::chrono::milliseconds collective_timeout = std::chrono::seconds(20);
  /// After this the harness names the ranks that still run and ends the process: a stuck thread
  /// cannot be unwound, and the test's locals must not die under it.
  std::chrono::milliseconds stuck_after = std::chrono::seconds(60);
  /// As in ProcessGroupOptions, or "two_hosts": shared memory on two simulated hosts, where there
  /// are more than two ranks (cases tagged [many]); or "shm_direct": shared memory, where every
  /// gradient has its own collective. Empty: DDP_TEST_BACKEND, or Gloo.
  std::string backend = "";
};

/// Far beyond the 5 s in which ranks have to notice each other's errors: tests of those errors must
/// not run into this timeout.
const RanksOptions kLongTimeout{std::chrono::seconds(50), std::chrono::seconds(55)};

inline RanksOptions over(
    const std::string& backend,
    std::chrono::milliseconds collective_timeout = std::chrono::seconds(20)) {
  RanksOptions options;
  options.backend = backend;
  options.collective_timeout = collective_timeout;
  return options;
}

/// Returns the seeds of `count` random cases. Each backend that the tests run over
/// (ddp_also_over in cmake/DdpTest.cmake) has others.
std::vector<int> seeds(int count);

/// Runs `body` once per rank, each on its own thread, and returns the ranks' errors ("" for none)
/// without their backtraces. For tests whose subject is the error.
std::vector<std::string> errors_of_ranks(
    int size, const RanksOptions& options, const std::function<void(const Rank&)>& body);
inline std::vector<std::string> errors_of_ranks(
    int size, const std::function<void(const Rank&)>& body, const RanksOptions& options = {}) {
  return errors_of_ranks(size, options, body);
}

/// The error that every rank throws.
/// \throws std::runtime_error  with two of them, where they differ.
template <typename... OptionsAndBody>
std::string error_of_all(int size, const OptionsAndBody&... arguments) {
  const auto errors = errors_of_ranks(size, arguments...);
  for (const auto& error : errors) {
    if (error != errors[0]) throw std::runtime_error("not the same: " + errors[0] + "\n" + error);
  }
  return errors[0];
}

/// Runs `body` once per rank, each on its own thread, and returns the ranks' results in order.
///
/// `body` must not use Catch2's macros, which are not thread safe in v2: it returns the values that
/// the test wants to check.
///
/// \throws std::runtime_error naming every rank that threw, with its message.
template <typename Result>
std::vector<Result> run_ranks(
    int size, const RanksOptions& options, const std::function<Result(const Rank&)>& body) {
  static_assert(!std::is_same_v<Result, bool>, "vector<bool> packs bits: the ranks would race");
  std::vector<Result> results(size);
  const auto errors =
      errors_of_ranks(size, options, [&](const Rank& self) { results[self.rank] = body(self); });
  std::string report;
  for (int rank = 0; rank < size; ++rank) {
    if (!errors[rank].empty()) report += "\n  rank " + std::to_string(rank) + ": " + errors[rank];
  }
  if (!report.empty()) throw std::runtime_error("ranks failed:" + report);
  return results;
}
template <typename Result>
std::vector<Result> run_ranks(
    int size, const std::function<Result(const Rank&)>& body, const RanksOptions& options = {}) {
  return run_ranks<Result>(size, options, body);
}

}  // namespace ddp::testing
