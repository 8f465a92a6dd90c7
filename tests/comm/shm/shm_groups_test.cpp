// Groups that are made of a group over shared memory: they share what that group has.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>

#include "comm/backends/shm/backend/fallback_backend.h"
#include "support/error_of.h"
#include "support/hosts.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::shm_groups_test {
namespace {

using c10d::ReduceOp;
using namespace testing;
using namespace std::chrono_literals;

backends::shm::FallbackBackend& backend_of(const ProcessGroup& group) {
  const auto backend = group->getBackend(at::kCPU);
  auto* shared = dynamic_cast<backends::shm::FallbackBackend*>(backend.get());
  TORCH_CHECK(shared, "expected shared memory, got ", backend->getBackendName());
  return *shared;
}

/// Sums the ranks of the world, and sends the first member's.
void use(const ProcessGroup& group, int world_rank, const std::vector<int>& members) {
  auto sum = at::full({1000}, world_rank);
  all_reduce(sum, ReduceOp::SUM, group);
  int expected = 0;
  for (const int member : members) expected += member;
  TORCH_CHECK(sum.eq(expected).all().item<bool>(), "wrong sum");
  auto sent = at::full({10}, world_rank);
  broadcast(sent, 0, group);
  TORCH_CHECK(sent.eq(members[0]).all().item<bool>(), "wrong broadcast");
}

/// What this process has of the system.
struct Resources {
  int mappings = 0;     // of memory that processes share
  int descriptors = 0;  // sockets, shared memory, watched processes
  int threads = 0;

  bool operator==(const Resources& other) const {
    return mappings == other.mappings && descriptors == other.descriptors &&
           threads == other.threads;
  }
};

std::ostream& operator<<(std::ostream& out, const Resources& r) {
  return out << r.mappings << " mappings, " << r.descriptors << " descriptors, " << r.threads
             << " threads";
}

int entries_of(const char* folder) {
  const std::filesystem::directory_iterator begin(folder), end;
  return static_cast<int>(std::distance(begin, end));
}

Resources resources() {
  Resources found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    found.mappings += line.find(" rw-s ") < line.size();
  found.descriptors = entries_of("/proc/self/fd");
  found.threads = entries_of("/proc/self/task");
  return found;
}

/// The offset of a tensor of 1 MiB that is allocated now: larger if smaller blocks are in use.
size_t free_from(const ProcessGroup& group) {
  auto& backend = backend_of(group);
  const auto tensor = backend.allocateTensor(1 << 20, at::dtype(at::kByte));
  return *backend.arena()->offset_of(tensor);
}

}  // namespace

TEST_CASE("further groups take no mappings, sockets and threads", "[shm][ranks]") {
  constexpr int kSize = 4;
  Resources one, many;
  run_ranks<int>(kSize, over("shm"), [&](const Rank& self) {
    std::vector<ProcessGroup> groups;
    const auto make_one = [&](size_t number) {
      std::vector<int> members;
      ProcessGroup group;
      if (number % 2 == 0) {
        for (int rank = 0; rank < kSize; ++rank) {
          if (rank % 2 == self.rank % 2) members.push_back(rank);
        }
        group = split_group(self.rank % 2, 0, self.group);
      } else {
        members = number % 4 == 1 ? std::vector<int>{1, 2, 3} : std::vector<int>{0, 1, 2, 3};
        group = new_group(members, self.group);
      }
      if (!group) return;
      use(group, self.rank, members);
      groups.push_back(group);
    };
    // Rank 0 measures while the others wait, in a barrier without threads of its own.
    const auto measure = [&](Resources& into) {
      barrier(self.group);
      if (self.rank == 0) into = resources();
      barrier(self.group);
    };
    make_one(0);
    make_one(1);
    measure(one);
    for (size_t number = 2; number < 22; ++number) make_one(number);
    measure(many);
    return 0;
  });
  CHECK(many == one);
}

TEST_CASE("groups that are destroyed give their memory back", "[shm][ranks]") {
  const auto places = run_ranks<std::vector<size_t>>(4, over("shm"), [](const Rank& self) {
    std::vector<size_t> places;
    const auto world = [](int first) { return std::vector<int>{first, 3}; };
    for (int round = 0; round < 30; ++round) {
      std::vector<ProcessGroup> groups;
      for (int number = 0; number < 10; ++number) {
        groups.push_back(new_group(world(number % 3), self.group));
        if (groups.back()) use(groups.back(), self.rank, world(number % 3));
      }
      // Each rank destroys them in an order of its own.
      std::rotate(groups.begin(), groups.begin() + self.rank * 2, groups.end());
      groups.clear();
      barrier(self.group);
      places.push_back(free_from(self.group));
      barrier(self.group);
    }
    return places;
  });
  for (const auto& of_rank : places) {
    // A block that the ranks left in another order is released by the next reservation, and ranks
    // destroy at times of their own: now and then some blocks more are in use. Leaked ones, of a
    // round each, would be in use in all of the last rounds.
    constexpr size_t kSlack = 64 << 10;
    CHECK(
        *std::min_element(of_rank.end() - 5, of_rank.end()) <=
        *std::max_element(of_rank.begin(), of_rank.begin() + 10) + kSlack);
  }
}

TEST_CASE("a tensor of one group's memory is reduced in place by another", "[shm][ranks]") {
  const auto results = run_ranks<at::Tensor>(3, over("shm"), [](const Rank& self) {
    const auto pair = new_group({1, 2}, self.group);
    auto tensor = backend_of(self.group).allocateTensor(1000, at::dtype(at::kFloat));
    tensor.fill_(self.rank);
    if (pair) all_reduce(tensor, ReduceOp::SUM, pair);
    all_reduce(tensor, ReduceOp::SUM, self.group);
    return tensor.clone();
  });
  for (const auto& result : results) CHECK(result.eq(6).all().item<bool>());
}

TEST_CASE("groups outlive the group that they were made of", "[shm][ranks]") {
  const auto errors = errors_of_ranks(3, over("shm"), [](const Rank& self) {
    auto parent = make_process_group(ProcessGroupOptions()
                                         .backend("shm")
                                         .store(self.store)
                                         .rank(self.rank)
                                         .world_size(3)
                                         .timeout(20s));
    auto upper = new_group({1, 2}, parent);
    auto own = upper ? new_group({1}, upper) : nullptr;
    barrier(parent);
    parent.reset();
    for (int i = 0; i < 3; ++i) {
      if (upper) use(upper, self.rank, {1, 2});
    }
    upper.reset();
    if (own) use(own, self.rank, {self.rank});
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a rank that leaves a group fails its members at once", "[shm][ranks][errors]") {
  const auto results = run_ranks<TimedError>(3, over("shm"), [](const Rank& self) {
    auto pair = new_group({0, 2}, self.group);
    TimedError seen;
    if (pair) use(pair, self.rank, {0, 2});
    if (self.rank == 2) pair.reset();
    if (self.rank == 0) {
      std::vector<at::Tensor> tensors{at::ones(10)};
      seen = timed_error_of([&] { pair->getBackend(at::kCPU)->allreduce(tensors)->wait(); });
    }
    use(self.group, self.rank, {0, 1, 2});  // it works on
    return seen;
  });
  CHECK(results[0].seconds < 5);
  CHECK_THAT(
      results[0].error,
      ContainsText("rank 1 (process ") && ContainsText("has left the process group"));
}

TEST_CASE("a group that is aborted alone leaves memory to the others", "[shm][ranks][errors]") {
  constexpr int64_t kNumel = 1 << 20;
  const auto results = run_ranks<std::vector<size_t>>(2, over("shm"), [&](const Rank& self) {
    const auto pair = new_group({0, 1}, self.group);
    auto& backend = backend_of(pair);
    // Rank 0 waits for a sum that rank 1 does not join, and rank 1 could still write to its
    // memory.
    std::vector<at::Tensor> tensors{backend.allocateTensor(kNumel, at::dtype(at::kFloat))};
    const auto arena = backend.arena();
    const auto pending = *arena->offset_of(tensors[0]);
    if (self.rank == 0) {
      const auto work = backend.allreduce(tensors, c10d::AllreduceOptions());
      backend.abort();
      TORCH_CHECK(!error_of([&] { work->wait(); }).empty());
    }
    tensors.clear();
    barrier(self.group);
    // The others use memory again, but not that.
    std::set<size_t> places;
    for (int i = 0; i < 10; ++i) {
      const auto other = backend_of(self.group).allocateTensor(kNumel, at::dtype(at::kFloat));
      places.insert(*arena->offset_of(other));
      use(self.group, self.rank, {0, 1});
    }
    return std::vector<size_t>{places.size(), places.count(pending)};
  });
  CHECK(results[0] == std::vector<size_t>{1, 0});
  CHECK(results[1] == std::vector<size_t>{1, 1});
}

TEST_CASE("groups over several hosts share the memory of each host", "[shm][hosts][ranks]") {
  const auto [ranks, name] = GENERATE(table<std::vector<int>, std::string>(
      {{{0, 1, 2, 3}, "several"}, {{1, 2, 3}, "several"}, {{2, 3}, "one"}, {{0, 2}, "apart"}}));
  CAPTURE(ranks, name);
  const auto errors = errors_of_ranks(4, [&, ranks = ranks, name = name](const Rank& self) {
    const auto parent = share_on_hosts(self.store, self.rank, "aabb", 20s, 20s);
    TORCH_CHECK(parent.backend, parent.why_not);
    if (std::count(ranks.begin(), ranks.end(), self.rank) == 0) return;
    const auto child = share_within(self.store, self.rank, ranks, parent.backend, 20s);
    if (name == "apart") {
      TORCH_CHECK(child.why_not.find("no two ranks are on one host") == 0, child.why_not);
      return;
    }
    TORCH_CHECK(child.backend, child.why_not);
    auto& backend = dynamic_cast<backends::shm::FallbackBackend&>(*child.backend);
    auto& of_parent = dynamic_cast<backends::shm::FallbackBackend&>(*parent.backend);
    TORCH_CHECK(backend.arena() == of_parent.arena());
    int expected = 0;
    for (const int rank : ranks) expected += rank;
    for (int i = 0; i < 3; ++i) {
      std::vector<at::Tensor> tensors{at::full({5000}, self.rank)};
      child.backend->allreduce(tensors)->wait();
      TORCH_CHECK(tensors[0].eq(expected).all().item<bool>());
    }
    child.backend->barrier()->wait();
  });
  CHECK(errors == std::vector<std::string>(4));
}

}  // namespace ddp::shm_groups_test
