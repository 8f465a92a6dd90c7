#include "hosts_backend.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>
#include <ddp/error_text.h>

#include "../../finishing_work.h"
#include "memory.h"
#include "ordered_reduction.h"
#include "reduce.h"
#include "relay_work.h"

namespace ddp::backends::shm {
namespace {

const char* title_of(Kind kind) {
  return kind == Kind::kBarrier ? "shm:barrier" : "shm:all_reduce";
}

// The leader, who waits for the other hosts, is the one to say that it took too long: it may wait
// that often for the group's timeout, for its host to gather, for the two collectives of an
// OrderedReduction, and to spread.
std::chrono::milliseconds wait_for_the_leader(std::chrono::milliseconds timeout) {
  constexpr int kWaitsOfTheLeader = 4;
  return kWaitsOfTheLeader * std::min(timeout, timeout.max() / kWaitsOfTheLeader);
}

}  // namespace

struct HostsBackend::Passage {
  Kind kind;
  at::Tensor tensor;  // the caller's
  at::Tensor memory;  // where the host's ranks see it
  c10d::AllreduceOptions options;
  c10::intrusive_ptr<RelayWork> work;
  std::promise<std::exception_ptr> gathered;
  uint64_t gather_number = 0;
};

/// A passage is begun by the caller, who gathers. Then the leader adds, on a thread that waits for
/// the host, and spreads, on one that waits for the other hosts; so steps begin in the order of the
/// calls, as on every other rank. Ends are told by those who drive `spread`, and failures by
/// whoever meets them.
class HostsBackend::Road : public std::enable_shared_from_this<Road> {
 public:
  Road(
      int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
      c10::intrusive_ptr<c10d::Backend> gloo)
      : host_(std::move(host)),
        world_size_(world_size),
        leaders_(std::move(leaders)),
        gloo_(std::move(gloo)) {}

  void open() {
    if (!host_.is_led_by_this_rank()) return;
    // The road keeps the threads, which so cannot keep the road.
    adder_ = std::make_unique<Conveyor<PassagePtr>>([weak = weak_from_this()](auto passage) {
      const auto road = weak.lock();
      road ? road->add(passage) : passage->work->end(backend_error(kGroupDestroyed));
    });
    spreader_ = std::make_unique<Conveyor<Added>>([weak = weak_from_this()](auto added) {
      const auto road = weak.lock();
      road ? road->spread_when(added) : added.passage->work->end(backend_error(kGroupDestroyed));
    });
  }

  const Host& host() const { return host_; }

  void set_timeout(std::chrono::milliseconds timeout) {
    host_.gather->set_timeout(timeout);
    host_.spread->set_timeout(leaders_ ? timeout : wait_for_the_leader(timeout));
    if (leaders_) leaders_->setTimeout(timeout);
  }

  void begin(const PassagePtr& passage) {
    ++under_way_;
    try {
      gather(passage);
      if (adder_) {
        hand_on(*adder_, passage);
      } else {
        spread(passage);
      }
    } catch (...) {
      end(passage, std::current_exception());
    }
  }

  /// What is under way fails on this host, and with that on the others.
  void fail(const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!failed_because_.empty()) return;
      failed_because_ = why;
      // Before anybody is told, also by a thread that comes here behind this one: nothing that is
      // called after that shall begin.
      gloo_->abort();
      if (leaders_) leaders_->abort();
    }
    host_.gather->fail(why);
    host_.spread->fail(why);
  }

  /// \throws c10::DistBackendError  after a failure, saying which.
  void check() const {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, failed_because_.empty(), failed_because_);
  }

  void close() {
    if (closed_.exchange(true)) return;
    host_.gather->progress();
    host_.spread->progress();
    if (under_way_ > 0) fail(kGroupDestroyed);
    if (adder_) adder_->close();
    if (spreader_) spreader_->close();
    host_.gather->close();
    host_.spread->close();
  }

 private:
  struct Added {
    PassagePtr passage;
    std::shared_ptr<OrderedReduction> sum;
  };

  void gather(const PassagePtr& passage) {
    const auto& memory = passage->memory;
    Call call;
    call.timeout = passage->options.timeout;
    call.descriptor = describe(passage->kind, memory, *host_.arena);
    call.descriptor.reduction = passage->options.reduceOp.op_;
    const auto numel = static_cast<size_t>(memory.numel());
    // Each rank adds up its part of the host's tensors, in the leader's memory.
    call.part = [type = memory.scalar_type(), op = passage->options.reduceOp,
                 begin = part_begin(numel, host_.local_rank, host_.local_size),
                 end = part_begin(numel, host_.local_rank + 1, host_.local_size),
                 share = 1.0 / world_size_](const auto& buffers) {
      reduce_elements(type, op, as_sources(buffers), {buffers[0]}, begin, end, share);
    };
    call.tell = [road = shared_from_this(), passage](const std::exception_ptr& error) {
      passage->gathered.set_value(error);
      if (error) road->fail(text_of(error));
    };
    passage->gather_number = host_.gather->begin(std::move(call));
  }

  template <typename Job>
  static void hand_on(Conveyor<Job>& conveyor, Job job) {
    TORCH_CHECK_WITH(DistBackendError, conveyor.push(std::move(job)), kGroupDestroyed);
  }

  // Gloo may forget what it was told to give up on, and then knows no end but its timeout.
  void wait_or_fail(c10d::Work& work) const {
    constexpr std::chrono::milliseconds kLookIn{250};
    while (!work.isCompleted()) {
      try {
        work.wait(kLookIn);
      } catch (const std::exception&) {
        // Late, or failed: the difference is whether it is over.
      }
      check();
    }
    work.wait();
  }

  // Gloo names connections. By its leader one knows a host.
  void between_hosts(c10::function_ref<void(OrderedReduction::Wait)> step) const {
    try {
      step([this](c10d::Work& work) { wait_or_fail(work); });
    } catch (const std::exception&) {
      check();
      TORCH_CHECK_WITH(
          DistBackendError, false, text_of(std::current_exception()),
          " (between hosts, whose leaders are ranks ", c10::Join(", ", host_.leaders), ")");
    }
  }

  // The leaders add up the hosts' sums.
  void add(const PassagePtr& passage) {
    auto gathered = passage->gathered.get_future();
    while (gathered.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      host_.gather->wait(passage->gather_number, std::chrono::milliseconds(50));
    }
    try {
      if (const auto error = gathered.get()) std::rethrow_exception(error);
      check();
      auto options = passage->options;
      // Shares were taken within the hosts.
      if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
      const auto sum = std::make_shared<OrderedReduction>(*leaders_, passage->memory, options);
      between_hosts([&](const auto& wait) { sum->combine(wait); });
      hand_on(*spreader_, {passage, sum});
    } catch (...) {
      end(passage, std::current_exception());
    }
  }

  void spread_when(const Added& added) {
    try {
      between_hosts([&](const auto& wait) { added.sum->finish(wait); });
      spread(added.passage);
    } catch (...) {
      end(added.passage, std::current_exception());
    }
  }

  // Everybody copies from the leader.
  void spread(const PassagePtr& passage) {
    const bool leads = host_.is_led_by_this_rank();
    Call call;
    call.timeout = leads ? passage->options.timeout : wait_for_the_leader(passage->options.timeout);
    call.descriptor = describe(Kind::kBroadcast, passage->memory, *host_.arena);
    if (leads) {
      call.finish = [passage] { assign(passage->tensor, passage->memory); };
    } else {
      call.part = [passage](const auto& buffers) {
        assign(passage->tensor, at_buffer(buffers[0], passage->tensor));
      };
    }
    call.tell = [road = shared_from_this(), passage](const std::exception_ptr& error) {
      road->end(passage, error);
    };
    host_.spread->announce(std::move(call));
  }

  void end(const PassagePtr& passage, const std::exception_ptr& error) {
    if (error) fail(text_of(error));
    --under_way_;
    passage->work->end(error);
  }

  const Host host_;
  const int world_size_;
  mutable std::mutex mutex_;
  std::string failed_because_;  // guarded by mutex_
  std::atomic<bool> closed_{false};
  std::atomic<int> under_way_{0};
  c10::intrusive_ptr<c10d::Backend> leaders_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // of all ranks
  std::unique_ptr<Conveyor<Added>> spreader_;
  std::unique_ptr<Conveyor<PassagePtr>> adder_;
};

HostsBackend::HostsBackend(
    int rank, int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
    c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
    : InArena(rank, world_size, host.arena, gloo),
      road_(
          std::make_shared<Road>(world_size, std::move(host), std::move(leaders), std::move(gloo))),
      latest_(WorkPtr()) {
  road_->set_timeout(timeout);
  road_->open();
}

HostsBackend::~HostsBackend() { road_->close(); }

void HostsBackend::setTimeout(std::chrono::milliseconds timeout) {
  OverGloo::setTimeout(timeout);
  road_->set_timeout(timeout);
}

uint64_t HostsBackend::getSequenceNumberForGroup() {
  return OverGloo::getSequenceNumberForGroup() + road_->host().gather->begun();
}

void HostsBackend::shutdown() {
  road_->close();
  OverGloo::shutdown();
}

void HostsBackend::abort() { road_->fail(kGroupAborted); }

HostsBackend::WorkPtr HostsBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0]) ||
      !can_reduce(tensors[0].scalar_type(), options.reduceOp)) {
    return OverGloo::allreduce(tensors, options);
  }
  return pass(Kind::kAllReduce, tensors[0], options);
}

// As a sum, of next to nothing. It ends behind those before it, which may still be about to say so,
// and behind what Gloo carries.
HostsBackend::WorkPtr HostsBackend::barrier(const c10d::BarrierOptions& options) {
  WorkPtr before;
  {
    const std::lock_guard lock(latest_mutex_);
    before = latest_.lock();
  }
  c10d::AllreduceOptions as_sum;
  as_sum.timeout = options.timeout;
  const auto barrier = pass(Kind::kBarrier, at::zeros({1}, at::kFloat), as_sum);
  std::vector<WorkPtr> parts{barrier};
  try {
    parts.push_back(OverGloo::barrier(options));
  } catch (const std::exception&) {
    road_->check();  // why Gloo's connections are closed
    throw;
  }
  if (before) parts.push_back(before);
  return together(std::move(parts));
}

HostsBackend::WorkPtr HostsBackend::pass(
    Kind kind, const Tensor& tensor, const c10d::AllreduceOptions& options) {
  const auto& host = road_->host();
  const bool reduces = kind == Kind::kAllReduce;
  const auto memory = shared(tensor, *arena_);  // first, as there may be none left
  const auto work = c10::make_intrusive<RelayWork>(
      std::vector<std::shared_ptr<Exchange>>{host.gather, host.spread}, rank_,
      reduces ? c10d::OpType::ALLREDUCE : c10d::OpType::BARRIER, title_of(kind),
      reduces ? Tensors{tensor} : Tensors{});
  const auto passage = std::make_shared<Passage>();
  passage->kind = kind;
  passage->tensor = tensor;
  passage->memory = memory;
  passage->options = options;
  passage->work = work;
  {
    const std::lock_guard lock(latest_mutex_);
    latest_ = WorkPtr(work);
  }
  road_->begin(passage);
  return work;
}

}  // namespace ddp::backends::shm
