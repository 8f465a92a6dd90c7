#include "support/ranks.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <thread>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/group/monitored_group.h"
#include "reducer/gradients/direct_gradient.h"

#include "support/foreign_locale.h"
#include "support/hosts.h"

namespace ddp::testing {
namespace {

/// Counts the ranks that have ended, and waits for all of them.
class EndBarrier {
 public:
  explicit EndBarrier(int size) : arrived_(size, 0) {}

  void arrive(int rank) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      arrived_[rank] = 1;
      ++count_;
    }
    changed_.notify_all();
  }

  /// Returns when every rank has either ended or called this function.
  void wait_for_others() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return count_ + waiting_ >= arrived_.size(); });
  }

  void wait_or_end_process(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto all = [&] { return count_ == arrived_.size(); };
    if (changed_.wait_for(lock, timeout, all)) return;
    std::string stuck;
    for (size_t rank = 0; rank < arrived_.size(); ++rank) {
      if (!arrived_[rank]) stuck += " " + std::to_string(rank);
    }
    std::fprintf(
        stderr, "run_ranks: after %lld ms these of %zu ranks are still running:%s\n",
        static_cast<long long>(timeout.count()), arrived_.size(), stuck.c_str());
    std::fflush(nullptr);
    std::_Exit(1);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> arrived_;
  size_t count_ = 0;
  size_t waiting_ = 0;  // never decremented: a waiting rank may wake later than other ranks arrive
};

// The same tests run over every backend that supports CPU tensors.
std::string backend_of(const RanksOptions& options) {
  const char* of_all = std::getenv("DDP_TEST_BACKEND");
  return !options.backend.empty() ? options.backend : of_all != nullptr ? of_all : "gloo";
}

/// Connects the ranks as if they were on two hosts, the second half of them on the second host.
void put_on_two_hosts(const Rank& self, std::chrono::milliseconds timeout) {
  std::string hosts(static_cast<size_t>(self.size), 'a');
  std::fill(hosts.begin() + (self.size + 1) / 2, hosts.end(), 'b');
  const auto store = c10::make_intrusive<c10d::PrefixStore>("two hosts", self.store);
  const auto shared = share_on_hosts(store, self.rank, hosts, timeout, timeout);
  TORCH_CHECK(shared.backend, shared.why_not);
  const auto type = c10d::ProcessGroup::strToBackendType(shared.backend->getBackendName());
  self.group->setBackend(c10::kCPU, type, shared.backend);
  self.group->setDefaultBackend(type);
  auto& group = dynamic_cast<MonitoredGroup&>(*self.group);
  group.find_backends();
  TORCH_CHECK(group.serving(c10::kCPU).backend == shared.backend);
}

void run_one(
    const RanksOptions& options, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    EndBarrier& finish, const std::function<void(const Rank&)>& body) {
  // Otherwise every rank would start as many workers as there are cores.
  at::set_num_threads(1);
  const auto backend = backend_of(options);
  const bool two_hosts = backend == "two_hosts";
  // Gradients of all sizes take the path of large ones.
  const bool direct = backend == "shm_direct";
  const bool within = backend == "shm_within";
  if (direct) DirectGradient::least_bytes = 1;
  const auto group = make_process_group(ProcessGroupOptions()
                                            .backend(
                                                two_hosts          ? "gloo"
                                                : direct || within ? "shm"
                                                                   : backend)
                                            .store(store)
                                            .rank(rank)
                                            .world_size(size)
                                            .timeout(options.collective_timeout));
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  const Rank self{rank, size, within ? new_group(all, group) : group, store, [&finish] {
                    finish.wait_for_others();
                  }};
  if (two_hosts && size > 2) put_on_two_hosts(self, options.collective_timeout);
  body(self);
}

}  // namespace

std::vector<int> seeds(int count) {
  const std::vector<std::string> backends{"gloo", "shm", "shm_direct", "two_hosts"};
  const auto found = std::find(backends.begin(), backends.end(), backend_of({}));
  // By hand, for more than a run of all tests has time for.
  if (const char* more = std::getenv("DDP_TEST_SEEDS")) count = std::atoi(more);
  std::vector<int> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), static_cast<int>(found - backends.begin()) * count);
  return result;
}

std::vector<std::string> errors_of_ranks(
    int size, const RanksOptions& options, const std::function<void(const Rank&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.collective_timeout);
  std::vector<std::string> errors(size);
  EndBarrier finish(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      errors[rank] = problem_of([&] { run_one(options, store, rank, size, finish, body); });
      finish.arrive(rank);
    });
  }
  finish.wait_or_end_process(options.stuck_after);
  for (auto& thread : threads) thread.join();
  return errors;
}

}  // namespace ddp::testing
