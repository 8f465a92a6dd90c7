// Ranks on threads that meet as processes do: over a port and over a file.
#include <ddp/collectives.h>

#include <unistd.h>

#include <cstdlib>
#include <future>

#include <ATen/ATen.h>

#include "comm/taken_port.h"

#include "support/catch.h"

using ddp::ProcessGroupOptions;
using ddp::testing::TakenPort;
using namespace std::chrono_literals;

namespace {

/// What a rank ends with: the sum of all ranks, or an error.
std::string meet(const ProcessGroupOptions& options) {
  try {
    const auto group = ddp::make_process_group(options);
    auto sum = at::full({1}, ddp::get_rank(group));
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, group);
    ddp::monitored_barrier(20s, group);  // rank 0's thread has the store
    return std::to_string(sum.item<int>());
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

std::vector<std::string> meet_all(
    const std::string& url, const std::vector<int>& present, int world_size,
    std::chrono::milliseconds timeout) {
  std::vector<std::future<std::string>> futures;
  for (const int rank : present) {
    const auto place =
        "?rank=" + std::to_string(rank) + "&world_size=" + std::to_string(world_size);
    futures.push_back(std::async(std::launch::async, [=] {
      return meet(ProcessGroupOptions().backend("gloo").init_method(url + place).timeout(timeout));
    }));
  }
  std::vector<std::string> outcomes;
  for (auto& future : futures) outcomes.push_back(future.get());
  return outcomes;
}

std::string free_address() {
  const int port = TakenPort().number();
  return "tcp://127.0.0.1:" + std::to_string(port);
}

/// A folder of its own that is gone with it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = "/tmp/ddp-comm-XXXXXX";
    const char* base = std::getenv("TMPDIR");
    if (base != nullptr) pattern = std::string(base) + "/ddp-comm-XXXXXX";
    TORCH_CHECK(mkdtemp(pattern.data()) != nullptr, "cannot make a folder like ", pattern);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    unlink(file().c_str());
    rmdir(path_.c_str());
  }

  std::string file() const { return path_ + "/meet"; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("ranks meet at a port", "[comm][ranks]") {
  const auto outcomes = meet_all(free_address(), {0, 1, 2}, 3, 20s);
  CHECK(outcomes == std::vector<std::string>(3, "3"));
}

TEST_CASE("ranks meet at a port that rank 0 opens last", "[comm][ranks]") {
  const auto url = free_address();
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 2, 20s); });
  CHECK(early.wait_for(300ms) == std::future_status::timeout);
  CHECK(meet_all(url, {0}, 2, 20s) == std::vector<std::string>{"1"});
  CHECK(early.get() == std::vector<std::string>{"1"});
}

TEST_CASE("ranks meet in a file, again and again", "[comm][ranks]") {
  const TemporaryFolder folder;
  for (int round = 0; round < 3; ++round) {
    const auto outcomes = meet_all("file://" + folder.file(), {0, 1, 2}, 3, 20s);
    CHECK(outcomes == std::vector<std::string>(3, "3"));
  }
}

TEST_CASE(
    "over a port every rank that came names those that did not, in time", "[comm][ranks][errors]") {
  const auto start = std::chrono::steady_clock::now();
  const auto outcomes = meet_all(free_address(), {0, 1}, 3, 1s);
  CHECK(std::chrono::steady_clock::now() - start < 2s);
  for (const auto& outcome : outcomes) {
    CHECK_THAT(
        outcome, ContainsText("init_process_group: expected all 3 ranks within 1000 ms, but rank 2 "
                              "did not come"));
  }
}

TEST_CASE("waiting for rank 0 and for the others shares one timeout", "[comm][ranks][errors]") {
  const auto url = free_address();
  const auto start = std::chrono::steady_clock::now();
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 3, 2s); });
  CHECK(early.wait_for(1200ms) == std::future_status::timeout);
  auto late = std::async(std::launch::async, [&] { return meet_all(url, {0}, 3, 2s); });
  CHECK_THAT(early.get().front(), ContainsText("but rank 2 did not come"));
  CHECK(std::chrono::steady_clock::now() - start < 3s);
  CHECK_THAT(late.get().front(), ContainsText("but rank 2 did not come"));
}

TEST_CASE("in a file every rank that came names those that did not", "[comm][ranks][errors]") {
  const TemporaryFolder folder;
  const auto outcomes = meet_all("file://" + folder.file(), {1, 2}, 3, 500ms);
  for (const auto& outcome : outcomes) CHECK_THAT(outcome, ContainsText("but rank 0 did not come"));
}
