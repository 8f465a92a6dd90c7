// A host that is ahead of its device: what the monitor sends in long steps. Time passes with each
// look of the DeviceWatch, and the device ends its collectives in it.
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include <torch/torch.h>

#include <ddp/collective_backend.h>
#include <ddp/internal/system/fd.h>

#include "comm/monitor/device_wait.h"
#include "comm/monitor/liveness_socket.h"
#include "comm/store/bounded_store.h"
#include "comm/watched_store.h"
#include "support/like_nccl.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr milliseconds kLook{500};

/// A socket that counts those who connect.
class Listener {
 public:
  Listener() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    constexpr int kBacklog = 1000;
    TORCH_CHECK(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0);
    TORCH_CHECK(::listen(socket_.get(), kBacklog) == 0);
    socklen_t size = sizeof any;
    ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&any), &size);
    port_ = ntohs(any.sin_port);
  }
  /// As that of a LivenessSocket.
  std::string address() const { return "127.0.0.1 " + std::to_string(port_); }
  /// Since the last call.
  int count_connections() const {
    int count = 0;
    while (Fd(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK)).get() >= 0) ++count;
    return count;
  }

 private:
  const Fd socket_;
  int port_ = 0;
};

/// The time of a rank, and its device, which takes as long for each collective.
class MadeUpDevice {
 public:
  explicit MadeUpDevice(milliseconds step) : step_(step), host_(std::this_thread::get_id()) {}

  /// On the watch's thread half a second later than before.
  Clock::time_point now() {
    const std::lock_guard lock(mutex_);
    if (std::this_thread::get_id() != host_ && !stands_) {
      now_ += kLook;
      while (!hangs_ && !queue_.empty() && begun_ + step_ <= now_) {
        begun_ += step_;
        queue_.front()->end(/*writes=*/false, c10d::WorkResult::SUCCESS);
        queue_.pop_front();
      }
    }
    return now_;
  }
  void push(const c10::intrusive_ptr<DeviceWork>& work) {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) begun_ = now_;
    queue_.push_back(work);
  }
  void stand() {
    const std::lock_guard lock(mutex_);
    stands_ = true;
  }
  void hang() {
    const std::lock_guard lock(mutex_);
    hangs_ = true;
  }

 private:
  const milliseconds step_;
  const std::thread::id host_;
  std::mutex mutex_;  // guards the members below
  Clock::time_point now_ = Clock::time_point() + std::chrono::hours(1);
  Clock::time_point begun_{};
  std::deque<c10::intrusive_ptr<DeviceWork>> queue_;
  bool stands_ = false, hangs_ = false;
};

class MadeUpBackend : public CollectiveBackend {
 public:
  MadeUpBackend(int rank, int size, MadeUpDevice& device)
      : CollectiveBackend(rank, size), device_(device) {}
  const std::string getBackendName() const override { return "nccl"; }
  WorkPtr run(Collective c) override {
    latest = c10::make_intrusive<DeviceWork>(nullptr, c.out, c.out);
    device_.push(latest);
    return latest;
  }
  void shutdown() override {}
  void abort() override {
    if (latest) latest->end(/*writes=*/false, c10d::WorkResult::SUCCESS);
  }

  c10::intrusive_ptr<DeviceWork> latest;

 private:
  MadeUpDevice& device_;
};

/// A rank of a job whose ranks all have the address of one socket.
struct MadeUpRank {
  MadeUpRank(const Rank& self, milliseconds step, const std::string& address, seconds timeout)
      : device(step), backend(c10::make_intrusive<MadeUpBackend>(self.rank, self.size, device)) {
    JobMonitor::Setup setup;
    setup.rank = self.rank;
    setup.size = self.size;
    store = c10::make_intrusive<c10d::PrefixStore>("job", self.store);
    store->set(report_key(self.rank), std::vector<uint8_t>{'\t'});
    setup.store = c10::make_intrusive<WatchedStore>(store, [this](auto&) { ++store_calls; });
    GlooDevices devices;
    devices.address = "127.0.0.1";
    setup.liveness = std::make_shared<LivenessSocket>(devices);
    setup.addresses.assign(static_cast<size_t>(self.size), address);
    setup.look_every = milliseconds(1);
    setup.now = [this] { return device.now(); };
    job = std::make_shared<JobMonitor>(setup);
    group = MonitoredGroup::make(
        c10::make_intrusive<c10d::PrefixStore>("group", self.store), self.rank, self.size);
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::NCCL, backend);
    group->setDefaultBackend("nccl");
    group->setGroupName("made up");
    GroupRecipe recipe;
    recipe.timeout = timeout;
    recipe.job = job;
    for (int rank = 0; rank < self.size; ++rank) recipe.world_ranks.push_back(rank);
    group->start_monitor(recipe, "");
  }

  void start() { group->allreduce(tensors, c10d::AllreduceOptions()); }
  /// With the host one step ahead.
  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      const auto before = backend->latest;
      start();
      if (before) before->wait_until_ended();
    }
  }

  std::vector<at::Tensor> tensors{torch::ones({1})};
  std::atomic<int> store_calls{0};
  MadeUpDevice device;
  c10::intrusive_ptr<MadeUpBackend> backend;
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<JobMonitor> job;
  c10::intrusive_ptr<MonitoredGroup> group;
};

}  // namespace

TEST_CASE("a device is late when it lost its pace", "[pure][device]") {
  const auto at = [](int s) { return Clock::time_point() + seconds(1000 + s); };
  DevicePace pace;
  CHECK(pace.idle_time(at(0), at(9)) == seconds(9));  // nothing of the job has ended yet
  CHECK(pace.expected(minutes(30)) == seconds(0));
  CHECK(pace.patience(minutes(30)) == seconds(5));
  CHECK(pace.patience(seconds(20)) == seconds(2));
  CHECK(pace.patience(seconds(1)) == milliseconds(500));
  pace.add_end(at(0), at(9));
  CHECK(pace.idle_time(at(0), at(11)) == seconds(2));  // the device was busy with another
  CHECK(pace.idle_time(at(10), at(11)) == seconds(1));
  CHECK(pace.expected(minutes(30)) == seconds(18));
  CHECK(pace.patience(minutes(30)) == seconds(18));
  CHECK(pace.patience(minutes(1)) == seconds(6));
  for (int i = 0; i < 256; ++i) pace.add_end(at(10 + i), at(11 + i));
  CHECK(pace.expected(minutes(30)) == seconds(2));
}

TEST_CASE("a host that is ahead of its device sends nothing in long steps", "[ranks][device]") {
  const auto step = GENERATE(milliseconds(200), milliseconds(3000));
  Listener all;
  const auto calls = run_ranks<int>(4, [&](const Rank& self) {
    MadeUpRank rank(self, step, all.address(), minutes(1));
    rank.run(20);
    const int sent = rank.store_calls;
    rank.backend->latest->wait_until_ended();
    return sent;
  });
  CHECK(calls == std::vector<int>{0, 0, 0, 0});
  CHECK(all.count_connections() == 0);
}

TEST_CASE("steps of any length send nothing once their length is known", "[ranks][device]") {
  const auto calls = run_ranks<int>(2, [](const Rank& self) {
    Listener all;
    MadeUpRank rank(self, seconds(20), all.address(), minutes(30));
    rank.run(3);
    rank.job->publish_waits();
    const auto settled = rank.job->executor().ask<int>([](c10d::Store&) { return 0; }, seconds(20));
    TORCH_CHECK(settled, "the store does not answer");
    const int before = rank.store_calls;
    (void)all.count_connections();
    rank.run(20);
    const int sent = rank.store_calls - before + all.count_connections();
    rank.backend->latest->wait_until_ended();
    return sent;
  });
  CHECK(calls == std::vector<int>{0, 0});
}

TEST_CASE("a host that polls for its device sends nothing at its pace", "[ranks][device]") {
  const auto calls = run_ranks<int>(2, [](const Rank& self) {
    Listener all;
    MadeUpRank rank(self, seconds(3), all.address(), minutes(30));
    rank.run(5);
    rank.device.stand();
    const auto end = Clock::now() + milliseconds(800);  // longer than a wait that is not late
    rank.group->monitor()->poll(
        [&] { return Clock::now() >= end; }, [] { return std::string("the status"); });
    const int sent = rank.store_calls;
    rank.group->abort();
    return sent;
  });
  CHECK(calls == std::vector<int>{0, 0});
}

TEST_CASE("a failed rank is found soon after long steps", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    Listener all;
    MadeUpRank rank(self, seconds(3), all.address(), minutes(30));
    rank.run(5);
    if (self.rank == 1) {
      rank.group->monitor()->fail("the batch of rank 1 is empty");
      return "";
    }
    rank.device.hang();
    const auto begin = rank.device.now();
    rank.backend->latest->wait_until_ended();  // by the abort
    const auto took = rank.device.now() - begin;
    TORCH_CHECK(took < seconds(60), "it took ", took / seconds(1), " s");
    return rank.group->monitor()->aborted().value_or("not aborted");
  });
  CHECK_THAT(errors[0], ContainsText("the batch of rank 1 is empty"));
}

TEST_CASE("a rank that ended is named after long steps", "[ranks][device][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    std::string refused;
    {
      const Listener ended;
      refused = ended.address();
    }
    MadeUpRank rank(self, seconds(3), refused, minutes(30));
    rank.run(5);
    if (self.rank == 0) {
      rank.device.hang();
    } else {
      self.wait_until_others_end();
    }
    rank.backend->latest->wait_until_ended();  // of rank 0 by the abort
    return rank.group->monitor()->aborted().value_or("not aborted");
  });
  CHECK_THAT(errors[0], ContainsText("all_reduce") && ContainsText("rank 1 of 2 has ended"));
}

}  // namespace ddp
