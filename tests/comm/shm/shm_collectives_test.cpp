// Properties that only shared memory has; the tests of all backends check its results.
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

c10::intrusive_ptr<c10d::Backend> backend_of(const Rank& self) {
  return self.group->getBackend(at::kCPU);
}

/// Another group of the same ranks.
ddp::ProcessGroup group_beside(const Rank& self, const std::string& backend) {
  return ddp::make_process_group(
      ddp::ProcessGroupOptions()
          .backend(backend)
          .store(c10::make_intrusive<c10d::PrefixStore>("beside", self.store))
          .rank(self.rank)
          .world_size(self.size)
          .timeout(20s));
}

/// Two sums of ten ones each, started one after the other.
struct TwoSums {
  explicit TwoSums(const Rank& self)
      : first(ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group)),
        second(ddp::all_reduce_async(u, c10d::ReduceOp::SUM, self.group)) {}

  at::Tensor t = at::ones(10);
  at::Tensor u = at::ones(10);
  WorkPtr first, second;
};

at::Tensor mine(const Rank& self, int64_t numel, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 100 + self.rank);
  return at::randn({numel}, generator);
}

}  // namespace

TEST_CASE("the default backend on one host is shared memory", "[shm][ranks]") {
  const auto names = run_ranks<std::string>(3, over("shm"), [](const Rank& self) {
    const auto group = group_beside(self, "");
    auto t = at::ones(3);
    ddp::all_reduce(t, c10d::ReduceOp::SUM, group);
    return group->getBackend(at::kCPU)->getBackendName() + std::to_string(t.sum().item<int64_t>());
  });
  CHECK(names == std::vector<std::string>(3, "shm9"));
}

TEST_CASE("a tensor from the backend is reduced in place", "[shm][ranks]") {
  const auto results = run_ranks<at::Tensor>(3, over("shm"), [](const Rank& self) {
    auto whole = backend_of(self)->allocateTensor(100, at::dtype(at::kDouble)).zero_();
    auto part = whole.narrow(0, 10, 50);
    const auto* address = part.const_data_ptr();
    part.fill_(self.rank + 1);
    ddp::all_reduce(part, c10d::ReduceOp::SUM, self.group);
    TORCH_CHECK(part.const_data_ptr() == address);
    return whole.clone();
  });
  auto expected = at::zeros(100, at::kDouble);
  expected.narrow(0, 10, 50).fill_(6);
  for (const auto& result : results) CHECK(at::equal(result, expected));
}

TEST_CASE(
    "elements are summed in rank order, to the bit, however tensors are cut", "[shm][ranks]") {
  constexpr int64_t kSize = 10007;
  const auto results = run_ranks<std::vector<at::Tensor>>(4, over("shm"), [](const Rank& self) {
    std::vector<at::Tensor> sums;
    for (const int64_t pieces : {1, 2, 7, 50}) {
      auto t = mine(self, kSize, 1);
      auto shared = backend_of(self)->allocateTensor(kSize, t.options());
      shared.copy_(t);
      std::vector<WorkPtr> works;
      for (auto& piece : (pieces % 2 == 0 ? t : shared).chunk(pieces)) {
        works.push_back(ddp::all_reduce_async(piece, c10d::ReduceOp::SUM, self.group));
      }
      for (auto& work : works) work->wait();
      sums.push_back((pieces % 2 == 0 ? t : shared).clone());
    }
    return sums;
  });
  auto expected = at::zeros(kSize);
  for (int rank = 0; rank < 4; ++rank) {
    const auto t = mine(Rank{rank, 4, {}, {}}, kSize, 1);
    expected = rank == 0 ? t : expected + t;
  }
  for (const auto& sums : results) {
    for (const auto& sum : sums) CHECK(at::equal(sum, expected));
  }
}

TEST_CASE("tensors reduced together are reduced as one flat tensor", "[shm][ranks]") {
  const auto op = GENERATE(c10d::ReduceOp::SUM, c10d::ReduceOp::AVG);
  const int size = GENERATE(2, 3);
  CAPTURE(size);
  const auto results = run_ranks<at::Tensor>(size, over("shm"), [&](const Rank& self) {
    // Tensors longer than a rank's share, empty, not contiguous, and one element of a view.
    const auto flat = mine(self, 2000, 1);
    std::vector<at::Tensor> tensors{
        flat.narrow(0, 0, 700).clone(), at::empty({0}),
        flat.narrow(0, 700, 1200).view({30, 40}).t().contiguous().t(),
        flat.narrow(0, 1900, 100)[7].clone(), flat.narrow(0, 1910, 90).clone()};
    TORCH_CHECK(!tensors[2].is_contiguous());
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = op;
    self.group->allreduce_coalesced(tensors, options)->wait();
    std::vector<at::Tensor> parts;
    for (const auto& t : tensors) parts.push_back(t.reshape({-1}));
    return at::cat(parts);
  });
  const float share = op == c10d::ReduceOp::AVG ? 1.0F / static_cast<float>(size) : 1.0F;
  at::Tensor expected;
  for (int rank = 0; rank < size; ++rank) {
    const auto t = mine(Rank{rank, size, {}, {}}, 2000, 1) * share;
    expected = rank == 0 ? t : expected + t;
  }
  expected = at::cat(
      {expected.narrow(0, 0, 1900), expected.narrow(0, 1907, 1), expected.narrow(0, 1910, 90)});
  for (const auto& result : results) CHECK(at::equal(result, expected));
}

TEST_CASE("more collectives may be pending than there are slots", "[shm][ranks]") {
  const auto results = run_ranks<int64_t>(2, over("shm"), [](const Rank& self) {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 1000; ++i) {
      if (self.rank == 1 && i % 300 == 0) std::this_thread::sleep_for(5ms);
      tensors.push_back(at::full({3}, i + self.rank, at::kLong));
      works.push_back(ddp::all_reduce_async(tensors.back(), c10d::ReduceOp::SUM, self.group));
    }
    int64_t right = 0;
    for (int i = 999; i >= 0; --i) {  // waits may have any order
      works[static_cast<size_t>(i)]->wait();
      right += tensors[static_cast<size_t>(i)].sum().item<int64_t>() == 3 * (2 * i + 1);
    }
    return right;
  });
  CHECK(results == std::vector<int64_t>{1000, 1000});
}

TEST_CASE("a rank that waits in Gloo does not block the others", "[shm][ranks]") {
  // Rank 0 is in Gloo when rank 1 needs its part of the sum.
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    auto t = at::ones(100000);
    const auto work = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
    auto message = at::ones(1);
    if (self.rank == 0) {
      ddp::recv(message, 1, 0, self.group);
      work->wait();
    } else {
      work->wait();
      ddp::send(message, 0, 0, self.group);
    }
    return t.sum().item<float>();
  });
  CHECK(results == std::vector<float>{200000, 200000});
}

TEST_CASE("a future's callback may start the next collective", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    auto t = at::ones(10);
    const auto first = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
    WorkPtr second;
    std::promise<void> begun;
    first->getFuture()->addCallback([&](c10::ivalue::Future&) {
      second = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
      begun.set_value();
    });
    first->wait();
    begun.get_future().wait();
    second->wait();
    return t.sum().item<float>();
  });
  CHECK(results == std::vector<float>{40, 40});
}

TEST_CASE("a broadcast does not change autograd's version counters", "[shm][ranks]") {
  const auto versions = run_ranks<int64_t>(2, over("shm"), [](const Rank& self) {
    auto t = at::full({4}, self.rank + 1.0);
    const auto before = t._version();
    ddp::broadcast(t, 0, self.group);
    TORCH_CHECK(t.sum().item<float>() == 4);
    return t._version() - before;
  });
  CHECK(versions == std::vector<int64_t>{0, 0});
}

TEST_CASE("a barrier completes after the calls that Gloo carries", "[shm][ranks]") {
  const auto completed = run_ranks<int>(2, over("shm"), [](const Rank& self) -> int {
    std::vector<at::Tensor> two{at::ones({1 << 24}), at::ones({1 << 24})};
    int completed = 0;
    for (int i = 0; i < 2; ++i) {
      const auto work = backend_of(self)->allreduce(two);
      ddp::barrier(self.group);
      completed += work->isCompleted() ? 1 : 0;
      ddp::barrier(self.group);
    }
    return completed;
  });
  CHECK(completed == std::vector<int>(2, 2));
}

TEST_CASE("a future's callback may wait for collectives", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    TwoSums sums(self);
    std::promise<float> sum;
    sums.first->getFuture()->addCallback([&](c10::ivalue::Future&) {
      sums.second->wait();  // later than this one
      auto v = at::ones(10);
      ddp::all_reduce(v, c10d::ReduceOp::SUM, self.group);
      sum.set_value((sums.t + sums.u + v).sum().item<float>());
    });
    return sum.get_future().get();  // without a wait that would make progress
  });
  CHECK(results == std::vector<float>{60, 60});
}

TEST_CASE("so may the callback of a collective that Gloo carries, and throw", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    const auto start_two = [&](std::vector<at::Tensor>& two) {
      return self.group->allreduce(two);  // of a list, so through Gloo
    };
    std::vector<at::Tensor> first{at::ones(10), at::ones(10)}, second = first;
    for (auto& tensor : second) tensor = tensor.clone();
    std::promise<float> sum;
    const auto work = start_two(first);
    work->getFuture()->addCallback([&](c10::ivalue::Future&) {
      start_two(second)->wait();  // but no barrier: Gloo's waits for the work of this callback
      sum.set_value(second[0].sum().item<float>());
      throw std::runtime_error("boom");
    });
    work->wait();
    auto sums = sum.get_future();
    TORCH_CHECK(sums.wait_for(std::chrono::seconds(10)) == std::future_status::ready, "hangs");
    return sums.get() + first[1].sum().item<float>();
  });
  CHECK(results == std::vector<float>{80, 80});  // Gloo sums the list as well
}

TEST_CASE("abort does not wait for callbacks", "[shm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, over("shm"), [](const Rank& self) {
    const auto sum = [&] {
      auto t = at::ones(10);
      return ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
    };
    if (self.rank == 1) {
      self.store->wait({"rank 0 has a callback"});
      sum()->wait();
      return sum()->wait();
    }
    std::promise<void> begins, may_end;
    const auto first = sum();
    first->getFuture()->addCallback(
        [&begins, end = may_end.get_future().share()](c10::ivalue::Future&) {
          begins.set_value();
          end.wait();
        });
    self.store->set("rank 0 has a callback", std::vector<uint8_t>{1});
    begins.get_future().wait();
    const auto aborted = timed_error_of([&] { backend_of(self)->abort(); });
    const auto then = error_of<c10::Error>([&] { sum()->wait(); });
    may_end.set_value();
    TORCH_CHECK(aborted.error.empty() && aborted.seconds < 5, "abort() waited");
    TORCH_CHECK(false, then);
  });
  CHECK_THAT(errors[0], ContainsText("shm: the process group was aborted"));
  CHECK_THAT(
      errors[1], ContainsText("rank 0") && ContainsText("shm: the process group was aborted"));
}

TEST_CASE("a callback that throws does not affect other collectives", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    TwoSums sums(self);
    try {
      sums.first->getFuture()->addCallback(
          [](c10::ivalue::Future&) { throw std::runtime_error("boom"); });
    } catch (const std::runtime_error&) {
      // It was over already, and the callback ran here.
    }
    sums.second->wait();
    return sums.u.sum().item<float>();
  });
  CHECK(results == std::vector<float>{20, 20});
}

TEST_CASE("a callback may drop the last reference to a group", "[shm][ranks]") {
  const auto results = run_ranks<int>(2, over("shm"), [](const Rank& self) {
    auto group = group_beside(self, "shm");
    auto t = at::ones(10);
    std::promise<void> dropped;
    {
      const auto work = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, group);
      work->getFuture()->addCallback(
          [&dropped, holder = std::make_shared<ddp::ProcessGroup>(group)](c10::ivalue::Future&) {
            std::this_thread::sleep_for(50ms);  // the other references are gone by then
            holder->reset();
            dropped.set_value();
          });
      group.reset();
    }
    dropped.get_future().wait();
    return 1;
  });
  CHECK(results == std::vector<int>{1, 1});
}

TEST_CASE("any thread can reduce tensors of inference mode", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    const c10::InferenceMode inference;
    float sum = 0;
    for (int i = 0; i < 20; ++i) {
      // Strided, so that it is not only a copy of bytes.
      auto t = at::ones({4, 6}).t();
      const auto work = ddp::broadcast_async(t, 0, self.group);
      const auto more = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, self.group);
      std::this_thread::sleep_for(self.rank == 0 ? 0ms : 5ms);
      work->wait();
      more->wait();
      sum += t.sum().item<float>();
    }
    return sum;
  });
  CHECK(results == std::vector<float>{960, 960});
}

TEST_CASE("two groups and two threads of a rank do not disturb each other", "[shm][ranks]") {
  const auto results = run_ranks<float>(2, over("shm"), [](const Rank& self) {
    const auto other = group_beside(self, "shm");
    const auto sums = [](const ddp::ProcessGroup& group) {
      float total = 0;
      for (int i = 0; i < 200; ++i) {
        auto t = at::full({100}, i);
        ddp::all_reduce(t, c10d::ReduceOp::SUM, group);
        total += t[0].item<float>();
      }
      return total;
    };
    auto in_thread = std::async(std::launch::async, [&] { return sums(other); });
    const float mine = sums(self.group);
    return mine + in_thread.get();
  });
  CHECK(results == std::vector<float>(2, 4 * 199 * 100));
}

TEST_CASE("every collective accepts memory from the backend", "[shm][ranks]") {
  const auto results = run_ranks<at::Tensor>(2, over("shm"), [](const Rank& self) {
    const auto backend = backend_of(self);
    auto input = backend->allocateTensor(6, at::dtype(at::kFloat)).fill_(self.rank + 1);
    auto all = backend->allocateTensor(12, at::dtype(at::kFloat)).zero_();
    backend->DDP_ALL_GATHER_SINGLE(all, input, {})->wait();
    auto scattered = backend->allocateTensor(6, at::dtype(at::kFloat)).zero_();
    backend->DDP_REDUCE_SCATTER_SINGLE(scattered, all, {})->wait();
    ddp::broadcast(input, 1, self.group);
    auto empty = at::empty({0});
    ddp::all_reduce(empty, c10d::ReduceOp::SUM, self.group);
    return at::cat({all, scattered, input});
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto expected = at::cat(
        {at::full({6}, 1.0), at::full({6}, 2.0), at::full({6}, 2.0 * (rank + 1)),
         at::full({6}, 2.0)});
    CHECK(at::equal(results[rank], expected));
  }
}
