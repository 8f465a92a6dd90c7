// Failures over shared memory: every rank throws in bounded time, naming the failed rank.
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>

#include "support/error_of.h"
#include "support/hosts.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using namespace std::chrono_literals;

namespace {

void sum_of_ones(const Rank& self) {
  auto t = at::ones(10);
  ddp::all_reduce(t, c10d::ReduceOp::SUM, self.group);
}

// Without the group's monitor, which aborts the group after any error.
void sum_in_backend(const Rank& self, at::Tensor t) {
  std::vector<at::Tensor> tensors{std::move(t)};
  self.group->getBackend(at::kCPU)->allreduce(tensors)->wait();
}

}  // namespace

TEST_CASE(
    "different collectives throw on every rank, and the backend still works", "[shm][errors]") {
  std::vector<std::string> caught(3);
  const auto errors = errors_of_ranks(3, over("shm"), [&](const Rank& self) {
    sum_in_backend(self, at::ones(10));
    caught[self.rank] =
        error_of<c10::Error>([&] { sum_in_backend(self, at::ones(self.rank == 2 ? 11 : 10)); });
    sum_in_backend(self, at::ones(10));
  });
  CHECK(errors == std::vector<std::string>(3));
  CHECK(caught[0] == caught[1]);
  CHECK(caught[0] == caught[2]);
  CHECK(
      caught[0] ==
      "shm: expected every rank to call the same collective number 1, but rank 0 called all_reduce "
      "of 10 x Float, SUM and rank 2 all_reduce of 11 x Float, SUM. Call the same collectives with "
      "tensors of equal sizes and dtypes in the same order on all ranks.");
}

TEST_CASE(
    "tensors of different sizes are an error although their elements are as many",
    "[shm][errors]") {
  const auto errors = errors_of_ranks(2, over("shm"), [](const Rank& self) {
    std::vector<at::Tensor> t{at::ones(10 + self.rank), at::ones(20 - self.rank)};
    self.group->allreduce_coalesced(t)->wait();
  });
  CHECK_THAT(
      errors, Each(Catch::Matchers::Matches(
                  ".*rank 0 called all_reduce of 30 x Float in 2 tensors of sizes #(\\d+), SUM and "
                  "rank 1 all_reduce of 30 x Float in 2 tensors of sizes #(?!\\1).*")));
}

TEST_CASE("shared memory carries each kind of collective, not Gloo", "[shm][errors]") {
  // The error of a rank that calls another collective shows which way the call took.
  using Backend = c10d::Backend;
  const std::vector<std::pair<std::string, std::function<WorkPtr(Backend&)>>> kinds{
      {"all_reduce of 10 x Float, SUM",
       [](Backend& backend) {
         std::vector<at::Tensor> t{at::ones(10)};
         return backend.allreduce(t);
       }},
      {"all_reduce of 11 x Float in 2 tensors of sizes #.*, SUM",
       [](Backend& backend) {
         std::vector<at::Tensor> t{at::ones(10), at::ones(1)};
         return backend.allreduce_coalesced(t);
       }},
      {"broadcast of 10 x Float from rank 1",
       [](Backend& backend) {
         std::vector<at::Tensor> t{at::ones(10)};
         return backend.broadcast(t, c10d::BroadcastOptions{1});
       }},
      {"all_gather of 10 x Float",
       [](Backend& backend) {
         std::vector<at::Tensor> from{at::ones(10)};
         std::vector<std::vector<at::Tensor>> to{{at::empty(10), at::empty(10)}};
         return backend.allgather(to, from);
       }},
      {"all_gather of 10 x Float",
       [](Backend& backend) {
         auto from = at::ones(10), to = at::empty(20);
         return backend.DDP_ALL_GATHER_SINGLE(to, from);
       }},
      {"reduce_scatter of 20 x Float, SUM",
       [](Backend& backend) {
         std::vector<at::Tensor> to{at::empty(10)};
         std::vector<std::vector<at::Tensor>> from{{at::ones(10), at::ones(10)}};
         return backend.reduce_scatter(to, from);
       }},
      {"reduce_scatter of 20 x Float, SUM",
       [](Backend& backend) {
         auto from = at::ones(20), to = at::empty(10);
         return backend.DDP_REDUCE_SCATTER_SINGLE(to, from);
       }},
      {"reduce of 10 x Float to rank 1, SUM",
       [](Backend& backend) {
         std::vector<at::Tensor> t{at::ones(10)};
         return backend.reduce(t, c10d::ReduceOptions{c10d::ReduceOp::SUM, 1});
       }},
      {"gather of 10 x Float to rank 1",
       [](Backend& backend) {
         std::vector<at::Tensor> from{at::ones(10)};
         std::vector<std::vector<at::Tensor>> to;
         return backend.gather(to, from, c10d::GatherOptions{1});
       }},
      {"scatter of 10 x Float from rank 1",
       [](Backend& backend) {
         std::vector<at::Tensor> to{at::ones(10)};
         std::vector<std::vector<at::Tensor>> from;
         return backend.scatter(to, from, c10d::ScatterOptions{1});
       }},
      {"all_to_all of Float",
       [](Backend& backend) {
         auto from = at::ones(10), to = at::empty(10);
         std::vector<int64_t> equal;
         return backend.DDP_ALL_TO_ALL_SINGLE(to, from, equal, equal);
       }},
      {"all_to_all of Float",
       [](Backend& backend) {
         std::vector<at::Tensor> from{at::ones(1), at::ones(2)}, to{at::empty(1), at::empty(2)};
         return backend.alltoall(to, from);
       }},
      {"barrier", [](Backend& backend) { return backend.barrier(); }},
  };
  const auto index = static_cast<size_t>(GENERATE(range(0, 13)));
  const auto& name = kinds[index].first;
  CAPTURE(name);
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    auto& backend = *self.group->getBackend(at::kCPU);
    std::vector<at::Tensor> t{at::ones(11)};
    const auto work = self.rank == 0 ? kinds[index].second(backend) : backend.allreduce(t);
    work->wait();
  });
  CHECK_THAT(
      errors,
      Each(Catch::Matchers::Matches(
          ".*but rank 0 called " + name + " and rank 1 all_reduce of 11 x Float, SUM. Call.*")));
}

TEST_CASE("a call that shared memory carries on some ranks only throws at once", "[shm][errors]") {
  // Gloo carries several tensors per rank, and refuses 16-bit integers, which matters less than the
  // mismatch.
  const bool refused = GENERATE(false, true);
  std::vector<double> waited(3);
  const auto errors = errors_of_ranks(3, over("shm", 6s), [&](const Rank& self) {
    sum_of_ones(self);
    const auto backend = self.group->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors{at::ones(10)};
    if (self.rank == 1 && refused) tensors[0] = tensors[0].to(at::kShort);
    if (self.rank == 1 && !refused) tensors.push_back(at::ones(10));
    const auto first = timed_error_of([&] { backend->allreduce(tensors)->wait(); });
    waited[self.rank] = first.seconds;
    const auto then = error_of([&] { sum_of_ones(self); });
    TORCH_CHECK(then.find("(through Gloo)") != std::string::npos, "it continues: ", then);
    TORCH_CHECK(first.error.empty(), first.error);
  });  // the time that rank 1 waits in Gloo at the end
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank, errors[rank]);
    CHECK(waited[rank] < 5.5);
    CHECK_THAT(
        errors[rank],
        ContainsText("rank 0 called all_reduce of 10 x Float, SUM and rank 1 all_reduce of ") &&
            ContainsText("(through Gloo)"));
  }
}

TEST_CASE("a missing rank is named when the timeout has passed", "[shm][errors]") {
  const auto errors = errors_of_ranks(3, over("shm", 4s), [](const Rank& self) {
    sum_of_ones(self);
    if (self.rank == 1) {
      self.wait_until_others_end();
    } else {
      sum_of_ones(self);
    }
  });
  CHECK(errors[1].empty());
  for (const int rank : {0, 2}) {
    CAPTURE(errors[rank]);
    // The rank that notices the timeout second throws the first one's text.
    CHECK_THAT(errors[rank], ContainsText("timed out after 4000 ms, rank 1 (at 1) did not come"));
    CHECK_THAT(errors[rank], ContainsText("collective number 1 (all_reduce of 10 x Float, SUM)"));
  }
}

TEST_CASE("a rank that leaves fails the others at once", "[shm][errors]") {
  std::vector<double> waited(2);
  const auto errors = errors_of_ranks(2, over("shm"), [&](const Rank& self) {
    sum_of_ones(self);
    if (self.rank == 1) {
      self.group->getBackend(at::kCPU)->shutdown();
      return;
    }
    waited[0] = timed_error_of<c10::Error>([&] { sum_of_ones(self); }).seconds;
    sum_of_ones(self);
  });
  CHECK(waited[0] < 15);
  CHECK_THAT(
      errors[0], ContainsText("rank 1 (process ") && ContainsText("has left the process group"));
}

TEST_CASE("a wait with a shorter timeout does not fail the collective", "[shm][errors]") {
  const auto errors = errors_of_ranks(2, over("shm"), [](const Rank& self) {
    if (self.rank == 1) self.store->wait({"rank 0 has waited"}, 20s);
    auto t = at::ones(10);
    const auto work = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
    if (self.rank == 0) {
      const auto text = error_of<c10::Error>([&] { work->wait(20ms); });
      self.store->set("rank 0 has waited", std::vector<uint8_t>{1});
      TORCH_CHECK(text.find("is not over after the 20 ms") != std::string::npos, text);
    }
    work->wait();
    TORCH_CHECK(t.sum().item<float>() == 20);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a collective that one rank aborts does not succeed on the others", "[shm][errors]") {
  // Rank 0 does its part of the sum, times out waiting for rank 1, and releases the memory.
  const auto errors = errors_of_ranks(2, over("shm", 3s), [](const Rank& self) {
    const auto backend = self.group->getBackend(at::kCPU);
    sum_of_ones(self);
    auto t = backend->allocateTensor(100000, at::dtype(at::kFloat)).fill_(1);
    if (self.rank == 1) self.store->wait({"rank 0 has aborted"}, 20s);
    const auto text = error_of<c10::Error>([&] { sum_in_backend(self, std::move(t)); });
    if (self.rank == 0) self.store->set("rank 0 has aborted", std::vector<uint8_t>{1});
    TORCH_CHECK(text.empty(), text);
  });
  CHECK_THAT(errors[0], ContainsText("timed out after 3000 ms, rank 1 (at 1) did not come"));
  CHECK_THAT(errors[1], ContainsText("rank 0 (process ") && ContainsText("has aborted"));
}

TEST_CASE("after a failure every later collective fails at once", "[shm][errors]") {
  const auto errors = errors_of_ranks(2, over("shm", 1s), [](const Rank& self) {
    if (self.rank == 1) return self.wait_until_others_end();
    for (int i = 0; i < 3; ++i) error_of<c10::Error>([&] { sum_of_ones(self); });
    TORCH_CHECK(timed_error_of<c10::Error>([&] { sum_of_ones(self); }).seconds < 0.5);
    sum_of_ones(self);
  });
  CHECK_THAT(errors[0], ContainsText("collective number 0") && ContainsText("timed out"));
  CHECK(errors[1].empty());
}

TEST_CASE("a rank that cannot start a collective fails the others at once", "[shm][errors]") {
  // "aab": over several hosts, shared memory only carries all_reduce.
  const auto [hosts, kind] = GENERATE(table<std::string, std::string>(
      {{"aaa", "all_reduce"},
       {"aaa", "all_reduce_coalesced"},
       {"aaa", "broadcast"},
       {"aaa", "all_gather"},
       {"aaa", "all_gather_into"},
       {"aaa", "reduce"},
       {"aaa", "gather"},
       {"aaa", "scatter"},
       {"aaa", "reduce_scatter"},
       {"aaa", "all_to_all"},
       {"aab", "all_reduce"}}));
  CAPTURE(hosts, kind);
  constexpr size_t kArena = 1 << 18;
  const auto call = [&, kind = kind](c10d::Backend& backend) -> WorkPtr {
    std::vector<at::Tensor> one{at::ones(10)};
    std::vector<std::vector<at::Tensor>> three{{at::ones(10), at::ones(10), at::ones(10)}};
    auto thirty = at::ones(30);
    if (kind == "all_reduce") return backend.allreduce(one);
    if (kind == "all_reduce_coalesced") return backend.allreduce_coalesced(three[0]);
    if (kind == "broadcast") return backend.broadcast(one, c10d::BroadcastOptions{1});
    if (kind == "all_gather") return backend.allgather(three, one);
    if (kind == "all_gather_into") return backend.DDP_ALL_GATHER_SINGLE(thirty, one[0]);
    if (kind == "all_to_all") return backend.alltoall(three[0], three[0]);
    if (kind == "reduce") return backend.reduce(one, c10d::ReduceOptions());
    if (kind == "gather") {  // whose root needs no memory
      if (backend.getRank() != 0) three.clear();
      return backend.gather(three, one, c10d::GatherOptions{0});
    }
    if (kind == "scatter") {  // whose root alone does
      if (backend.getRank() != 1) three.clear();
      return backend.scatter(one, three, c10d::ScatterOptions{1});
    }
    return backend.reduce_scatter(one, three);
  };
  std::vector<double> waited(3);
  const auto errors = errors_of_ranks(3, [&, hosts = hosts](const Rank& self) {
    const auto shared = share_on_hosts(self.store, self.rank, hosts, 30s, 30s, kArena);
    TORCH_CHECK(shared.backend, shared.why_not);
    at::Tensor all_memory;
    if (self.rank == 1) all_memory = shared.backend->allocateTensor(kArena, at::dtype(at::kByte));
    const auto failed = timed_error_of([&] { call(*shared.backend)->wait(); });
    waited[self.rank] = failed.seconds;
    self.wait_until_others_end();
    TORCH_CHECK(failed.error.empty(), failed.error);
  });
  for (const int rank : {0, 1, 2}) {
    CAPTURE(rank, errors[rank]);
    CHECK(waited[rank] < 10);
    CHECK_FALSE(errors[rank].empty());
  }
  CHECK_THAT(errors[1], ContainsText("shared memory: expected 4096 bytes in one block"));
  // A rank on another host fails through Gloo's connections.
  const std::string why =
      "on rank 1 of 3: shared memory: expected 4096 bytes in one block, but the ";
  CHECK_THAT(errors[0], ContainsText("shm: expected to start ") && ContainsText(why));
  if (hosts == "aaa") CHECK_THAT(errors[2], ContainsText(why));
}
