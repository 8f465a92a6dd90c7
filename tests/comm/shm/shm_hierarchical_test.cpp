// Shared memory on several hosts, simulated by ranks with different host names.
#include <chrono>
#include <cmath>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>

#include "support/error_of.h"
#include "support/hosts.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

/// \param hosts  a letter for each rank: ranks with the same letter are on one host.
ddp::backends::shm::BootstrapResult make(
    const Rank& self, const std::string& hosts, std::chrono::milliseconds timeout = 20s) {
  return share_on_hosts(self.store, self.rank, hosts, timeout, timeout);
}

BackendPtr backend_of(
    const Rank& self, const std::string& hosts, std::chrono::milliseconds timeout = 20s) {
  auto shared = make(self, hosts, timeout);
  TORCH_CHECK(shared.backend, shared.why_not);
  return shared.backend;
}

WorkPtr start(const BackendPtr& backend, const at::Tensor& t, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors{t};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return backend->allreduce(tensors, options);
}

/// The error of waiting for `work`; "" for none.
std::string error_in(const WorkPtr& work) {
  return ddp::problem_of([&] { work->wait(); });
}

at::Tensor mine(int rank, int64_t numel, int64_t seed, at::ScalarType type) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + rank);
  // Whole numbers, whose sums do not depend on the order.
  return at::randint(0, 20, {numel}, generator, at::kLong).to(type);
}

}  // namespace

TEST_CASE("all_reduce sums over all hosts", "[shm][hosts][ranks]") {
  const std::string hosts = GENERATE("aabb", "abab", "aaab", "abcbb", "aabbcc");
  const auto type = GENERATE(at::kFloat, at::kBFloat16, at::kByte);
  const int64_t numel = GENERATE(0, 1, 1000, 200003);
  CAPTURE(hosts, numel);
  const int size = static_cast<int>(hosts.size());
  const auto results = run_ranks<std::vector<at::Tensor>>(size, [&](const Rank& self) {
    const auto backend = backend_of(self, hosts);
    TORCH_CHECK(backend->getBackendName() == "shm");
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 4; ++i) {
      auto t = mine(self.rank, numel, i, type);
      if (i % 2 == 1) {
        auto memory = backend->allocateTensor(numel, t.options());
        memory.copy_(t);
        t = memory;
      }
      tensors.push_back(t);
      works.push_back(start(backend, t, i < 2 ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX));
    }
    for (int i = 3; i >= 0; --i) works[static_cast<size_t>(i)]->wait();
    std::vector<at::Tensor> copies;
    for (const auto& t : tensors) copies.push_back(t.clone());
    return copies;
  });
  for (int i = 0; i < 4; ++i) {
    at::Tensor expected;
    for (int rank = 0; rank < size; ++rank) {
      const auto t = mine(rank, numel, i, type);
      if (rank == 0)
        expected = t;
      else
        expected = i < 2 ? expected + t : at::max(expected, t);
    }
    for (const auto& result : results) CHECK(at::equal(result[static_cast<size_t>(i)], expected));
  }
}

TEST_CASE("an element's sum does not depend on its position", "[shm][hosts][ranks]") {
  const std::string hosts = GENERATE("aabc", "aabbccdd");
  CAPTURE(hosts);
  constexpr int64_t kNumel = 1000;
  const auto of_rank = [](int rank) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
    return at::randn({kNumel}, generator, at::dtype(at::kFloat));
  };
  const auto results =
      run_ranks<std::vector<at::Tensor>>(static_cast<int>(hosts.size()), [&](const Rank& self) {
        const auto backend = backend_of(self, hosts);
        const auto whole = of_rank(self.rank), cut = of_rank(self.rank);
        start(backend, whole, c10d::ReduceOp::SUM)->wait();
        for (const auto& piece : cut.split(70)) start(backend, piece, c10d::ReduceOp::SUM)->wait();
        return std::vector<at::Tensor>{whole, cut};
      });
  at::Tensor expected, of_host;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto t = of_rank(static_cast<int>(rank));
    of_host = rank > 0 && hosts[rank] == hosts[rank - 1] ? of_host + t : t;
    const bool last = rank + 1 == hosts.size() || hosts[rank + 1] != hosts[rank];
    if (last) expected = expected.defined() ? expected + of_host : of_host;
  }
  for (const auto& result : results) {
    CHECK(at::equal(result[0], expected));
    CHECK(at::equal(result[1], expected));
  }
}

TEST_CASE("a NaN on any rank stays a NaN in minima and maxima", "[shm][hosts][ranks]") {
  const std::string hosts = GENERATE("aab", "aabb", "aabc");
  const auto op = GENERATE(c10d::ReduceOp::MIN, c10d::ReduceOp::MAX);
  CAPTURE(hosts);
  const int size = static_cast<int>(hosts.size());
  constexpr int64_t kNumel = 1000;
  const auto results = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    auto t = at::arange(kNumel, at::kFloat);
    using at::indexing::Slice;
    t.index_put_({Slice(self.rank, c10::nullopt, 10)}, NAN);
    start(backend_of(self, hosts), t, op)->wait();
    return t;
  });
  const auto number = at::arange(kNumel);
  const auto expected = (number % 10) < size;  // each rank has one at every tenth position
  for (const auto& result : results) CHECK(at::equal(at::isnan(result), expected));
}

TEST_CASE("an average divides by the number of all ranks", "[shm][hosts][ranks]") {
  const auto results = run_ranks<at::Tensor>(4, [](const Rank& self) {
    const auto backend = backend_of(self, "aaab");
    auto t = at::full({100}, 4.0 * self.rank);
    start(backend, t, c10d::ReduceOp::AVG)->wait();
    return t;
  });
  for (const auto& result : results) CHECK(at::equal(result, at::full({100}, 6.0)));
}

TEST_CASE(
    "futures of sums over hosts complete, and their callbacks may start other sums",
    "[shm][hosts]") {
  const auto results = run_ranks<at::Tensor>(4, [](const Rank& self) {
    const auto backend = backend_of(self, "aabb");
    const auto first = at::ones({10}), second = at::ones({10});
    WorkPtr later;
    std::promise<void> begun;
    const auto work = start(backend, first, c10d::ReduceOp::SUM);
    work->getFuture()->addCallback([&](c10::ivalue::Future&) {
      later = start(backend, second + first, c10d::ReduceOp::SUM);
      begun.set_value();
    });
    begun.get_future().wait();
    later->wait();
    return later->result().at(0);
  });
  for (const auto& result : results) CHECK(at::equal(result, at::full({10}, 20.0)));
}

TEST_CASE("Gloo carries the other collectives over several hosts", "[shm][hosts][ranks]") {
  const auto results = run_ranks<at::Tensor>(3, [](const Rank& self) {
    const auto backend = backend_of(self, "aab");
    std::vector<at::Tensor> t{at::full({5}, 1.0 * self.rank)};
    c10d::BroadcastOptions options;
    options.rootRank = 2;
    backend->broadcast(t, options)->wait();
    backend->barrier()->wait();
    return t[0];
  });
  for (const auto& result : results) CHECK(at::equal(result, at::full({5}, 2.0)));
}

TEST_CASE("a barrier completes after the sums that started before it", "[shm][hosts][ranks]") {
  const int64_t of_sum = GENERATE(1 << 23, 10);
  const int64_t of_broadcast = of_sum == 10 ? 1 << 25 : 10;  // which Gloo carries
  const auto over = run_ranks<int>(3, [&](const Rank& self) -> int {
    const auto backend = backend_of(self, "aab");
    std::vector<at::Tensor> t{at::ones({of_broadcast})};
    const auto work = start(backend, at::ones({of_sum}), c10d::ReduceOp::SUM);
    const auto of_gloo = backend->broadcast(t);
    backend->barrier()->wait();
    return work->isCompleted() && of_gloo->isCompleted();
  });
  CHECK(over == std::vector<int>(3, 1));
}

TEST_CASE("if each rank has a host of its own, there is no shared backend", "[shm][hosts][ranks]") {
  const auto reasons =
      run_ranks<std::string>(3, [](const Rank& self) { return make(self, "abc").why_not; });
  for (const auto& reason : reasons) {
    CHECK(reason == "no two ranks are on one host and in one container");
  }
}

TEST_CASE("a missing rank is named on its host", "[shm][hosts][errors]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(4, [](const Rank& self) {
    const auto backend = backend_of(self, "aabb", 3s);
    start(backend, at::ones({10}), c10d::ReduceOp::SUM)->wait();
    if (self.rank == 3) {
      self.wait_until_others_end();
      return;
    }
    const auto first = start(backend, at::ones({10}), c10d::ReduceOp::SUM);
    const auto second = start(backend, at::ones({10}), c10d::ReduceOp::SUM);
    const auto text = error_in(first);
    TORCH_CHECK(!error_in(second).empty(), "the second did not fail");
    TORCH_CHECK(text.empty(), text);
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() < 15);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_FALSE(errors[static_cast<size_t>(rank)].empty());
    CHECK(errors[static_cast<size_t>(rank)].find("second") == std::string::npos);
  }
  CHECK_THAT(errors[2], ContainsText("timed out after 3000 ms, rank 3 (at 1) did not come"));
}

TEST_CASE("a failure on one host fails the others at once", "[shm][hosts][errors]") {
  const std::string hosts = GENERATE("aabb", "aabc");
  const int who = GENERATE(0, 1, 2, 3);
  const bool aborts = GENERATE(false, true);  // or drops the backend
  CAPTURE(hosts, who, aborts);
  std::vector<BackendPtr> kept(4);
  std::vector<double> took(4);
  const auto errors = errors_of_ranks(4, [&](const Rank& self) {
    auto backend = backend_of(self, hosts, 30s);
    start(backend, at::ones({10}), c10d::ReduceOp::SUM)->wait();
    if (self.rank == who) {
      std::this_thread::sleep_for(200ms);
      aborts ? backend->abort() : backend.reset();
      kept[static_cast<size_t>(self.rank)] = backend;
      return;
    }
    const auto [text, seconds] =
        timed_error_of([&] { start(backend, at::ones({10}), c10d::ReduceOp::SUM)->wait(); });
    took[static_cast<size_t>(self.rank)] = seconds;
    kept[static_cast<size_t>(self.rank)] = backend;  // its end must not fail the others
    TORCH_CHECK(text.empty(), text);
  });
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == who) continue;
    CAPTURE(rank, errors[static_cast<size_t>(rank)]);
    CHECK_FALSE(errors[static_cast<size_t>(rank)].empty());
    CHECK(took[static_cast<size_t>(rank)] < 5);
  }
}

TEST_CASE("a group of several hosts can end with pending sums", "[shm][hosts][ranks]") {
  const std::string hosts = GENERATE("aaabb", "aabbc");
  for (int round = 0; round < 20; ++round) {
    const auto errors = errors_of_ranks(5, [&](const Rank& self) {
      auto backend = backend_of(self, hosts);
      ddp::barrier(self.group);  // Gloo's connect fails if a rank that has connected ends first
      const auto t = at::ones({1000});
      const auto work = start(backend, t, c10d::ReduceOp::SUM);
      if (round % 2 == 0) work->wait();
      backend.reset();
      // The sum has succeeded or failed; a rank that waited for it has its result.
      const auto text = error_in(work);
      TORCH_CHECK(text.empty() || round % 2 == 1, text);
      if (text.empty()) TORCH_CHECK(at::equal(t, at::full({1000}, 5.0)));
    });
    CHECK(errors == std::vector<std::string>(5));
  }
}

TEST_CASE("a wait with the longest timeout does not overflow", "[shm][hosts][ranks]") {
  const auto errors = errors_of_ranks(4, [](const Rank& self) {
    const auto backend = backend_of(self, "aabb");
    if (self.rank == 3) std::this_thread::sleep_for(100ms);
    const auto t = at::ones({10});
    start(backend, t, c10d::ReduceOp::SUM)->wait(std::chrono::milliseconds::max());
    TORCH_CHECK(at::equal(t, at::full({10}, 4.0)));
  });
  CHECK(errors == std::vector<std::string>(4));
}

TEST_CASE("callbacks may wait for other sums, throw, or end the group", "[shm][hosts][ranks]") {
  const std::string hosts = GENERATE("aabb", "aaab");
  const auto errors = errors_of_ranks(4, [&](const Rank& self) {
    auto backend = backend_of(self, hosts);
    const auto t = at::ones({10});
    std::promise<std::string> waited;
    const auto first = start(backend, t, c10d::ReduceOp::SUM);
    first->getFuture()->addCallback([&](c10::ivalue::Future&) {
      waited.set_value(error_in(start(backend, t.clone(), c10d::ReduceOp::SUM)));
    });
    TORCH_CHECK(waited.get_future().get().empty());
    const auto second = start(backend, t.clone(), c10d::ReduceOp::SUM);
    const auto add = [&] {
      second->getFuture()->addCallback(
          [](c10::ivalue::Future&) { throw std::runtime_error("boom"); });
    };
    ddp::problem_of(add);  // throws here if the sum has already completed
    second->wait();
    std::promise<void> ended;
    const auto third = start(backend, t.clone(), c10d::ReduceOp::SUM);
    third->wait();
    auto fourth = start(backend, t.clone(), c10d::ReduceOp::SUM);
    fourth->getFuture()->addCallback(
        [&ended, last = std::move(backend)](c10::ivalue::Future&) mutable {
          last.reset();
          ended.set_value();
        });
    ended.get_future().wait();
  });
  CHECK(errors == std::vector<std::string>(4));
}

TEST_CASE("a call that does not match aborts the group with the reason", "[shm][hosts][errors]") {
  const auto errors = errors_of_ranks(4, [](const Rank& self) {
    const auto backend = backend_of(self, "aabb");
    const auto text =
        error_in(start(backend, at::ones({self.rank == 1 ? 11 : 10}), c10d::ReduceOp::SUM));
    TORCH_CHECK(text.empty(), text);
  });
  for (const auto& error : errors) CHECK_FALSE(error.empty());
  CHECK_THAT(
      errors[0], ContainsText("rank 0 called all_reduce of 10 x Float, SUM and rank 1 all_reduce "
                              "of 11 x Float, SUM"));
}

TEST_CASE("collectives that Gloo carries fail with the group over hosts", "[shm][hosts][errors]") {
  std::vector<BackendPtr> kept(4);
  std::vector<std::string> first(4), then(4);
  std::vector<double> took(4);
  const auto errors = errors_of_ranks(4, [&](const Rank& self) {
    const auto rank = static_cast<size_t>(self.rank);
    auto backend = backend_of(self, "aabb", 30s);
    backend->barrier()->wait();
    const auto begin = std::chrono::steady_clock::now();
    std::vector<at::Tensor> t{at::ones({10})};
    if (self.rank == 1) {  // calls a sum instead of the others' barrier in Gloo
      error_in(start(backend, t[0], c10d::ReduceOp::SUM));
      kept[rank] = backend;
      return;
    }
    first[rank] = ddp::problem_of([&] { backend->barrier()->wait(); });
    then[rank] = ddp::problem_of([&] { backend->broadcast(t)->wait(); });
    backend.reset();
    took[rank] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  });
  CHECK(errors == std::vector<std::string>(4));
  for (const size_t rank : {0, 2, 3}) {
    CAPTURE(rank, first[rank], then[rank]);
    CHECK_FALSE(first[rank].empty());
    CHECK(first[rank].find("connections were closed") == std::string::npos);  // but the reason
    CHECK_THAT(then[rank], ContainsText("its connections were closed on rank "));
    CHECK(took[rank] < 5);
  }
}
