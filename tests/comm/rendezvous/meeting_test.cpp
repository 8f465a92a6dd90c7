// Ranks on threads that find each other as processes do: over a port and over a file.
#include <ddp/collectives.h>

#include <future>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/base/executor.h"
#include "comm/rendezvous/rendezvous.h"
#include "support/taken_port.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using ddp::ProcessGroupOptions;
using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {

/// The result of a rank: the sum of all ranks, or an error.
std::string connect_and_sum(const ProcessGroupOptions& options) {
  try {
    const auto group = ddp::make_process_group(options);
    auto sum = at::full({1}, ddp::get_rank(group));
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, group);
    ddp::monitored_barrier(20s, group);  // because rank 0's thread owns the store
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
      return connect_and_sum(
          ProcessGroupOptions().backend("gloo").init_method(url + place).timeout(timeout));
    }));
  }
  std::vector<std::string> outcomes;
  for (auto& future : futures) outcomes.push_back(future.get());
  return outcomes;
}

std::string free_address() {
  const int port = free_port();
  return "tcp://127.0.0.1:" + std::to_string(port);
}

/// Makes a store at that address, as an earlier group could have left it.
c10::intrusive_ptr<c10d::Store> store_at(const std::string& url) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1)));
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

void wait_for(c10d::Store& store, const std::string& key) {
  while (!store.check({key})) std::this_thread::sleep_for(1ms);
}

/// Makes a store in the file, writes to it and destroys it, repeatedly, as successive groups do;
/// false once a store has lost a key that it wrote.
bool reopen_store(const std::string& url, int rank) {
  for (int round = 0; round < 400; ++round) {
    const auto store =
        ddp::rendezvous(
            ProcessGroupOptions().init_method(url).rank(rank).world_size(2), {}, ddp::Deadline(20s))
            .store;
    const auto key = std::to_string(rank) + "/" + std::to_string(round);
    store->set(key, std::string("here"));
    if (!store->check({key})) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("ranks connect at a port", "[comm][ranks][once]") {
  const auto outcomes = meet_all(free_address(), {0, 1, 2}, 3, 20s);
  CHECK(outcomes == std::vector<std::string>(3, "3"));
}

TEST_CASE("ranks connect at a port that rank 0 opens last", "[comm][ranks][once]") {
  const auto url = free_address();
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 2, 20s); });
  CHECK(early.wait_for(300ms) == std::future_status::timeout);
  CHECK(meet_all(url, {0}, 2, 20s) == std::vector<std::string>{"1"});
  CHECK(early.get() == std::vector<std::string>{"1"});
}

TEST_CASE("ranks connect through one file repeatedly", "[comm][ranks][once]") {
  const TemporaryFolder folder;
  for (int round = 0; round < 3; ++round) {
    const auto outcomes = meet_all("file://" + folder.file("meet"), {0, 1, 2}, 3, 20s);
    CHECK(outcomes == std::vector<std::string>(3, "3"));
    CHECK(names_in(folder.path()).empty());
  }
}

TEST_CASE("a group that leaves does not remove the file of the next one", "[comm][ranks][once]") {
  const TemporaryFolder folder;
  const auto url = "file://" + folder.file("meet");
  std::vector<std::future<std::optional<bool>>> futures;
  for (const int rank : {0, 1}) {
    futures.push_back(std::async(std::launch::async, [=] {
      // c10d's own FileStore never returns in this case.
      return ddp::bounded_call(
          [=] { return reopen_store(url, rank); }, std::chrono::steady_clock::now() + 20s);
    }));
  }
  for (auto& future : futures) CHECK(future.get() == true);
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE(
    "a rank that finds an earlier group's store connects to the next one", "[comm][ranks][once]") {
  const auto url = free_address();
  auto earlier = store_at(url);
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1, 2}, 3, 20s); });
  wait_for(*earlier, "ddp/init/open");
  earlier.reset();
  CHECK(meet_all(url, {0}, 3, 20s) == std::vector<std::string>{"3"});
  CHECK(early.get() == std::vector<std::string>(2, "3"));
}

TEST_CASE("a rank that finds no next store throws both errors", "[comm][ranks][errors][once]") {
  const auto url = free_address();
  auto earlier = store_at(url);
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 2, 2s); });
  wait_for(*earlier, "ddp/init/open");
  earlier.reset();
  CHECK_THAT(
      early.get().front(),
      ContainsText("within 2000 ms, but rank 1 of 2 did not reach it") &&
          ContainsText(" Before that, init_process_group on rank 1 of 2: lost the store while"));
}

TEST_CASE(
    "a rank throws at once if the store ends after all ranks have arrived",
    "[comm][ranks][errors][once]") {
  const auto url = free_address();
  auto store = store_at(url);
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 2, 50s); });
  wait_for(*store, "ddp/init/open");
  const auto round = "ddp/init/" + store->get_to_str("ddp/init/open");
  wait_for(*store, round + "/here/1");
  store->set(round + "/full", std::string("1"));  // as rank 0 would set it
  wait_for(*store, round + "/alive/1");
  store.reset();
  REQUIRE(early.wait_for(20s) == std::future_status::ready);
  CHECK_THAT(
      early.get().front(),
      Catch::Matchers::StartsWith("init_process_group on rank 1 of 2: lost the store"));
}

TEST_CASE(
    "over a port every rank that arrived names the missing ones in time",
    "[comm][ranks][errors][once]") {
  const auto start = std::chrono::steady_clock::now();
  const auto outcomes = meet_all(free_address(), {0, 1}, 3, 4s);
  CHECK(std::chrono::steady_clock::now() - start < 7s);  // not two timeouts
  CHECK_THAT(
      outcomes,
      Each(ContainsText("init_process_group: expected all 3 ranks within 4000 ms, but rank 2 "
                        "did not come")));
}

TEST_CASE(
    "waiting for rank 0 and for the others shares one timeout", "[comm][ranks][errors][once]") {
  const auto url = free_address();
  const auto start = std::chrono::steady_clock::now();
  auto early = std::async(std::launch::async, [&] { return meet_all(url, {1}, 3, 6s); });
  CHECK(early.wait_for(2s) == std::future_status::timeout);
  auto late = std::async(std::launch::async, [&] { return meet_all(url, {0}, 3, 6s); });
  CHECK_THAT(early.get().front(), ContainsText("but rank 2 did not come"));
  CHECK(std::chrono::steady_clock::now() - start < 7500ms);  // 8 s with a timeout for each
  CHECK_THAT(late.get().front(), ContainsText("but rank 2 did not come"));
}

TEST_CASE(
    "in a file every rank that arrived names the missing ones", "[comm][ranks][errors][once]") {
  const TemporaryFolder folder;
  const auto outcomes = meet_all("file://" + folder.file("meet"), {1, 2}, 3, 4s);
  for (const auto& outcome : outcomes) CHECK_THAT(outcome, ContainsText("but rank 0 did not come"));
}
