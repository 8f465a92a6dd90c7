// Failures while the host waits for a device, over a backend that behaves like NCCL.
#include <atomic>
#include <future>
#include <thread>

#include <ddp/collectives.h>
#include <torch/torch.h>

#include "comm/monitor/abort_calls.h"
#include "comm/monitor/device_wait.h"
#include "support/error_of.h"
#include "support/like_nccl.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// At its end a case waits so long for an all-reduce that one rank alone has started over Gloo,
/// which carries it.
const RanksOptions kShortTimeout{seconds(3)};

/// Starts an all-reduce of a one, of which only the stream waits for the end.
at::Tensor start_sum(const ProcessGroup& group) {
  auto tensor = torch::ones({1});
  all_reduce(tensor, c10d::ReduceOp::SUM, group);
  return tensor;
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

TEST_CASE(
    "a rank that waits for its device learns of a rank that threw", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    const auto backend = like_nccl(self);
    backend->on_stream = true;
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(700));
      group->monitor()->fail("the batch of rank 1 is empty");
      return "";
    }
    start_sum(group);
    const auto waited = seconds_of([&] { backend->synchronize_device(); });
    TORCH_CHECK(waited < 8, "waited for ", waited, " s");
    return error_of<c10::DistBackendError>([&] { start_sum(group); });
  });
  CHECK_THAT(errors[0], ContainsText("the batch of rank 1 is empty") && ContainsText("aborted"));
}

TEST_CASE(
    "a collective that the watchdog ends is a failure of the job", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(
      2,
      [](const Rank& self) -> std::string {
        const auto backend = like_nccl(self);
        backend->on_stream = true;
        backend->watchdog_timeout = milliseconds(300);
        const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
        if (self.rank == 0) {
          start_sum(group);
          backend->synchronize_device();
        }
        const auto end = Clock::now() + seconds(8);
        while (!group->monitor()->aborted() && Clock::now() < end && self.rank == 0) {
          std::this_thread::sleep_for(milliseconds(10));
        }
        if (self.rank == 1) {
          self.wait_until_others_end();
          return "";
        }
        return error_of<c10::DistBackendError>([&] { start_sum(group); });
      },
      kShortTimeout);
  CHECK_THAT(
      errors[0], ContainsText("all_reduce of 1 x Float, SUM failed on rank 0 of 2: timed out"));
}

TEST_CASE(
    "a collective that a rank does not join ends after the group's timeout",
    "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(
      2,
      [](const Rank& self) -> std::string {
        const auto backend = like_nccl(self);
        backend->on_stream = true;
        const auto group = monitored_like_nccl(backend, self, job_like_nccl(self), "", seconds(1));
        if (self.rank == 1) {
          self.wait_until_others_end();
          return "";
        }
        start_sum(group);
        const auto waited = seconds_of([&] { backend->synchronize_device(); });
        TORCH_CHECK(waited < 9, "waited for ", waited, " s");
        return error_of<c10::DistBackendError>([&] { start_sum(group); });
      },
      kShortTimeout);
  CHECK_THAT(errors[0], ContainsText("all_reduce") && ContainsText("timed out after 1000 ms"));
}

TEST_CASE("a message that NCCL runs in the order of calls has a text", "[ranks][device][errors]") {
  const bool has_device_id = GENERATE(false, true);
  const bool is_batch = GENERATE(false, true);
  const auto errors = run_ranks<std::string>(
      2,
      [&](const Rank& self) -> std::string {
        const auto backend = like_nccl(self);
        backend->on_stream = true;
        const auto group = monitored_like_nccl(
            backend, self, job_like_nccl(self), "", seconds(1),
            has_device_id ? std::optional(c10::Device(at::kCUDA, 0)) : std::nullopt);
        if (self.rank == 1) {
          self.wait_until_others_end();
          return "";
        }
        auto to = torch::zeros({1});
        if (is_batch) {
          batch_isend_irecv({P2POp::recv(to, 1)}, group);
        } else {
          recv_async(to, 1, 0, group);
        }
        backend->synchronize_device();
        return error_of<c10::DistBackendError>([&] { start_sum(group); });
      },
      kShortTimeout);
  CHECK_THAT(errors[0], ContainsText("timed out after 1000 ms"));
  const auto advice = ContainsText("start those that wait for each other with batch_isend_irecv");
  if (has_device_id && !is_batch) {
    CHECK_THAT(errors[0], advice);
  } else {
    CHECK_THAT(errors[0], !advice);
  }
}

TEST_CASE("a process can wait for aborts that still run", "[pure]") {
  std::atomic<bool> is_over{false};
  std::promise<void> may_end;
  call_aborts(
      {[&] {
        may_end.get_future().wait();
        is_over = true;
      }},
      milliseconds(10));
  wait_for_aborts(milliseconds(10));
  CHECK_FALSE(is_over);
  may_end.set_value();
  wait_for_aborts(seconds(20));
  CHECK(is_over);
}

TEST_CASE("collectives that end on the device are no failure", "[ranks][device]") {
  const auto sums = run_ranks<float>(2, [](const Rank& self) {
    const auto backend = like_nccl(self);
    backend->on_stream = true;
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    if (self.rank == 1) std::this_thread::sleep_for(milliseconds(1300));
    at::Tensor sum;
    for (int i = 0; i < 3; ++i) sum = start_sum(group);
    backend->synchronize_device();
    group->monitor()->wait_for_device([] { return std::string("the test"); });
    return sum.item<float>();
  });
  CHECK(sums == std::vector<float>{2, 2});
}

TEST_CASE("a group that is dropped ends its collectives before", "[ranks][device]") {
  const bool destroys = GENERATE(false, true);
  const auto results = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    const auto backend = like_nccl(self);
    backend->on_stream = true;
    ProcessGroup group = monitored_like_nccl(backend, self, job_like_nccl(self));
    if (self.rank == 1) std::this_thread::sleep_for(milliseconds(300));
    const auto sum = start_sum(group);
    if (destroys) destroy_process_group(group);
    group.reset();
    return std::vector<float>{sum.item<float>(), static_cast<float>(backend->shutdowns)};
  });
  for (const auto& rank : results) CHECK(rank == std::vector<float>{2, 1});
}

TEST_CASE(
    "a group whose collectives cannot end is dropped in bounded time", "[ranks][device][errors]") {
  const auto waits = run_ranks<double>(2, [](const Rank& self) {
    const auto backend = like_nccl(self);
    backend->on_stream = true;
    auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      group->monitor()->fail("rank 1 has failed");
      return 0.;
    }
    start_sum(group);
    const auto waited = seconds_of([&] { group.reset(); });
    TORCH_CHECK(backend->shutdowns == 0, "shutdown() after a failure");
    return waited;
  });
  CHECK(waits[0] < 8);
}

TEST_CASE("two groups of a device are aborted together", "[ranks][device][errors]") {
  const auto waits = run_ranks<double>(
      2,
      [](const Rank& self) {
        const auto job = job_like_nccl(self);
        const auto one = like_nccl(self), other = like_nccl(self);
        one->on_stream = other->on_stream = true;
        one->beside = other.get();
        const auto first = monitored_like_nccl(one, self, job, "1");
        const auto second = monitored_like_nccl(other, self, job, "2");
        if (self.rank == 1) {
          self.wait_until_others_end();
          return 0.;
        }
        start_sum(second);  // which holds up the abort of the first
        const auto waited = seconds_of([&] { abort_process_group(first); });
        TORCH_CHECK(second->monitor()->aborted(), "the second group is not aborted");
        other->synchronize_device();
        one->beside = nullptr;
        return waited;
      },
      kShortTimeout);
  CHECK(waits[0] < 2.5);
}

TEST_CASE("a poll that ends after an abort throws", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    const auto backend = like_nccl(self);
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    group->monitor()->fail("aborted by another thread");
    return error_of<c10::DistBackendError>([&] {
      group->monitor()->poll([] { return true; }, [] { return std::string("the status"); });
    });
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("aborted by another thread"));
}

TEST_CASE("a barrier over NCCL alone ends when a rank has failed", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    const auto backend = like_nccl(self);
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    if (self.rank == 1) {
      std::this_thread::sleep_for(milliseconds(300));
      group->monitor()->fail("rank 1 does not come");
      return "";
    }
    return error_of<c10::DistBackendError>([&] { barrier(group); });
  });
  CHECK_THAT(errors[0], ContainsText("rank 1 does not come"));
}

TEST_CASE("handles of several parts can be polled over NCCL", "[ranks][device]") {
  const auto gathered = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto backend = like_nccl(self);
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    std::vector<at::Tensor> outputs{torch::zeros({1}), torch::zeros({2})};
    const auto work =
        all_gather_async(outputs, torch::full({self.rank + 1}, 1.F + self.rank), group);
    const auto end = Clock::now() + seconds(20);
    while (!work->isCompleted() && Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    TORCH_CHECK(work->isSuccess());
    return std::vector<float>{outputs[0].item<float>(), outputs[1].sum().item<float>()};
  });
  for (const auto& rank : gathered) CHECK(rank == std::vector<float>{1, 4});
}

TEST_CASE("a batch of messages is one call of NCCL, in any order", "[ranks][device]") {
  const auto received = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto backend = like_nccl(self);
    const auto group = monitored_like_nccl(backend, self, job_like_nccl(self));
    const int peer = 1 - self.rank;
    auto to = torch::zeros({2, 3}).t();  // not contiguous: it is received in a copy
    const std::vector<P2POp> ops{
        P2POp::send(torch::full({3, 2}, 1.F + self.rank), peer), P2POp::recv(to, peer)};
    const auto works = batch_isend_irecv(ops, group);
    for (const auto& work : works) work->wait();
    return std::vector<float>{
        to.min().item<float>(), to.max().item<float>(), static_cast<float>(works.size()),
        static_cast<float>(backend->batches)};
  });
  CHECK(received[0] == std::vector<float>{2, 2, 1, 1});
  CHECK(received[1] == std::vector<float>{1, 1, 1, 1});
}

}  // namespace ddp
