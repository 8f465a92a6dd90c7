// The only file that includes ProcessGroupGloo.hpp, and so the only one compiled with gloo_shim/.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/c10d_names.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "backends/gloo.h"
#include "backends/gloo_message.h"
#include "backends/gloo_point_to_point.h"
#include "backends/registry.h"
#include "bounded_store.h"
#include "collective_call.h"
#include "composite_work.h"
#include "tags.h"

namespace ddp::backends {
namespace {

using c10d::ProcessGroupGloo;
using Kind = CollectiveKind;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// c10d's flight recorder looks up a group's entry, and makes it, without a lock. So the groups of a
// process start one call at a time. The mutex is recursive because some calls start others.
std::recursive_mutex& start_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

/// ProcessGroupGloo, but
///   - threads may start collectives in several groups at once
///   - collectives that differ do not meet: see tag_with()
///   - the handle of a reduce-scatter is as those of the others: see reduce_part()
///   - abort() fails the collectives under way and all later ones, and does not wait for their end
///   - sends and receives take the group's timeout, not the timeout of connecting, and can be
///     polled; messages say what they are, see MessageHead
class Gloo : public ProcessGroupGloo {
 public:
  using Base = ProcessGroupGloo;
  using Base::Base;

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return begin(
        describe_call(Kind::kBroadcast, t, -1, o.rootRank), [&] { return Base::broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return begin(
        describe_call(Kind::kAllReduce, t, o.reduceOp.op_), [&] { return Base::allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return begin(describe_call(Kind::kAllReduce, t, o.reduceOp.op_), [&] {
      return Base::allreduce_sparse(t, o);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return begin(describe_call(Kind::kAllReduce, t, o.reduceOp.op_), [&] {
      return Base::allreduce_coalesced(t, o);
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return begin(describe_call(Kind::kReduce, t, o.reduceOp.op_, o.rootRank), [&] {
      return Base::reduce(t, o);
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return begin(
        describe_call(Kind::kAllGather, from), [&] { return Base::allgather(to, from, o); });
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& o) override {
    return begin(describe_call(Kind::kAllGather, from), [&] {
      return Base::DDP_ALL_GATHER_SINGLE(to, from, o);
    });
  }
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return begin(describe_call(Kind::kAllGather, from), [&] {
      return Base::allgather_coalesced(to, from, o);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return begin(describe_call(Kind::kAllGather, from), [&] {
      return Base::allgather_into_tensor_coalesced(to, from, o);
    });
  }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& o) override {
    return begin(describe_call(Kind::kGather, from, -1, o.rootRank), [&] {
      return Base::gather(to, from, o);
    });
  }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& o) override {
    return begin(describe_call(Kind::kScatter, to, -1, o.rootRank), [&] {
      return Base::scatter(to, from, o);
    });
  }
  WorkPtr reduce_scatter(
      Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& o) override {
    Tensors parts;
    int64_t first = 0;
    for (size_t rank = 0; rank < from.at(0).size(); ++rank) {
      parts.push_back(from[0][rank].reshape({-1}));
      if (rank < static_cast<size_t>(rank_)) first += parts.back().numel();
    }
    return reduce_part(to.at(0), at::cat(parts), first, o);
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    const auto copy = from.reshape({-1}).clone();
    return reduce_part(to, copy, copy.numel() / size_ * rank_, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < to.size(); ++i) {
      works.push_back(DDP_REDUCE_SCATTER_SINGLE(to[i], from.at(i), o));
    }
    return combine_works(std::move(works), to);
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_splits,
      std::vector<int64_t>& from_splits, const c10d::AllToAllOptions& o) override {
    return begin(describe_call(Kind::kAllToAll, from), [&] {
      return Base::DDP_ALL_TO_ALL_SINGLE(to, from, to_splits, from_splits, o);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return begin(describe_call(Kind::kBarrier, {}), [&] { return Base::barrier(o); });
  }

  WorkPtr send(Tensors& t, int dst, int tag) override {
    check_message("send", t, tag);
    const auto tensor = t[0].cpu();
    return begin([&]() -> WorkPtr {
      const int elements_tag =
          fits_in_packet(tensor) ? MessageHead::kInPacket : next_elements_tag();
      Tensors packet{make_packet(tensor, elements_tag)};
      const WorkPtr first = Base::send(packet, dst, tag);
      WorkPtr second;
      if (elements_tag != MessageHead::kInPacket) {
        Tensors elements{tensor};
        second = Base::send(elements, dst, elements_tag);
      }
      const auto transfer = [first, second](const GlooPointToPoint::Wait& wait) {
        return wait(first) && (!second || wait(second));
      };
      return c10::make_intrusive<GlooPointToPoint>(first, transfer, options_->timeout);
    });
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    check_message("recv", t, tag);
    return receive(t[0], tag, [&](Tensors& packet) { return Base::recv(packet, src, tag); });
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    check_message("recv", t, tag);
    return receive(t[0], tag, [&](Tensors& packet) { return Base::recvAnysource(packet, tag); });
  }

  // It sends messages with the count of collectives as their tag, in which tag_with() leaves more.
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    {
      const std::lock_guard lock(start_mutex());
      collectiveCounter_ &= kCountMask;
    }
    Base::monitoredBarrier(o, wait_all_ranks);
  }

  // ProcessGroupGloo has none: its base class does nothing.
  void abort() override {
    const std::lock_guard lock(start_mutex());
    if (std::exchange(aborted_, true)) return;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) give_up_on(peer);
    }
    outlive_what_is_under_way();
  }

 private:
  // Gloo matches the ranks' messages by kind of collective and tag, which c10d takes from a count
  // of collectives. Where a message meets a buffer of another size, Gloo throws on its own thread,
  // which ends the process; of equal sizes, one dtype is summed as the other. So half of the tag is
  // of what is called: messages of calls that differ wait for each other, until the monitors of the
  // waiting ranks find the difference. 16 bits of a count are more than are under way at a time.
  static constexpr uint32_t kCountMask = 0xffff;
  void tag_with(const CollectiveCall& call) {
    collectiveCounter_ = (static_cast<uint32_t>(call.hash() >> 32) & ~kCountMask) |
                         (collectiveCounter_ & kCountMask);
  }

  // A reduce-scatter, which Gloo does not have: as ProcessGroupGloo's, an all-reduce of everything.
  // But the handle of that is complete only once its wait() has returned, never where it throws,
  // and has no future.
  WorkPtr reduce_part(
      const at::Tensor& to, const at::Tensor& all, int64_t first,
      const c10d::ReduceScatterOptions& o) {
    c10d::AllreduceOptions options;
    options.reduceOp = o.reduceOp;
    options.timeout = o.timeout;
    Tensors tensors{all};
    const auto call = describe_call(Kind::kReduceScatter, tensors, o.reduceOp.op_);
    const auto work = begin(call, [&] { return Base::allreduce(tensors, options); });
    const auto take_part = [to, part = all.narrow(0, first, to.numel())] {
      at::Tensor(to).copy_(part.view(to.sizes()));
    };
    return c10::make_intrusive<CompositeWork>(std::vector<WorkPtr>{work}, take_part, Tensors{to});
  }

  template <typename Start>
  WorkPtr begin(const CollectiveCall& call, const Start& start) {
    return begin([&] {
      tag_with(call);
      return start();
    });
  }

  // A call after abort() would fail in Gloo, too, but with an error about another call.
  template <typename Call>
  WorkPtr begin(const Call& call) {
    const std::lock_guard lock(start_mutex());
    DDP_CHECK_WITH(
        DistBackendError, !aborted_,
        "Gloo: expected a working process group, but its connections were closed on rank ", rank_,
        ", by abort() or after a failure that was reported before. Make a new group.");
    auto work = call();
    // The destructor waits for these works, and not for works that are made of them.
    if (dynamic_cast<AsyncWork*>(work.get())) {
      ++*under_way_;
      work->getFuture()->addCallback([count = under_way_](c10::ivalue::Future&) { --*count; });
    }
    return work;
  }

  // Gloo forgets a send whose connection breaks while Gloo writes to it (seen in its ring
  // all-reduce). The send ends with its timeout, and the destructor waits until then. So a thread
  // of its own holds the last reference.
  void outlive_what_is_under_way() {
    if (*under_way_ == 0) return;
    auto self = c10::intrusive_ptr<Gloo>::unsafe_reclaim_from_nonowning(this);
    try {
      std::thread([self = std::move(self)] {
        constexpr std::chrono::milliseconds kPoll{10};
        while (*self->under_way_ > 0) std::this_thread::sleep_for(kPoll);
      }).detach();
    } catch (const std::system_error&) {
      // No thread to be had: the destructor waits.
    }
  }

  // By a receive that no rank sends for. The first receive that times out makes Gloo close all
  // connections of its context, and fail the calls that use them, now and later. Closing the
  // connections here would fail the calls under way alone, and not those that wait for one of
  // Gloo's threads.
  void give_up_on(int peer) {
    for (size_t i = 0; i < contexts_.size(); ++i) {
      Tensors nothing{at::empty({1})};
      const int tag = std::numeric_limits<int>::max() - static_cast<int>(i);
      try {
        Base::recv(nothing, peer, tag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // The timeout.
      }
    }
  }

  int next_elements_tag() {
    constexpr uint32_t kMask = 0x1fffffff;  // those above are give_up_on()'s
    return kMostTag + 1 + static_cast<int>(elements_sent_++ & kMask);
  }

  // A sender may wait until a long message's elements are received. So the receive goes on in a
  // thread of its own, though its caller may first do something else.
  template <typename Start>
  WorkPtr receive(const at::Tensor& tensor, int tag, const Start& start_packet) {
    Tensors packet{empty_packet()};
    auto self = c10::intrusive_ptr<Gloo>::unsafe_reclaim_from_nonowning(this);
    auto work = begin([&]() -> WorkPtr {
      const WorkPtr first = start_packet(packet);
      auto transfer = [self, first, packet = packet[0], tensor, tag](const auto& wait) {
        return wait(first) && self->take(packet, tensor, first->sourceRank(), tag, wait);
      };
      return c10::make_intrusive<GlooPointToPoint>(first, std::move(transfer), options_->timeout);
    });
    if (!fits_in_packet(tensor)) static_cast<GlooPointToPoint&>(*work).start();
    return work;
  }

  // What is not for `tensor` is received too: its sender waits for that, and the message after it
  // is another one.
  bool take(
      const at::Tensor& packet, const at::Tensor& tensor, int source, int tag,
      const GlooPointToPoint::Wait& wait) {
    const auto head = head_of(packet);
    const bool fits = is_for(head, tensor);
    auto host = fits && tensor.is_cpu() ? tensor : at::empty({head.bytes}, at::kByte);
    if (head.elements_tag != MessageHead::kInPacket) {
      Tensors elements{host};
      if (!wait(begin([&] { return Base::recv(elements, source, head.elements_tag); }))) {
        return false;
      }
    } else if (fits) {
      take_elements(packet, host);
    }
    check_received(head, tensor, source, tag, rank_, size_);
    if (!tensor.is_cpu()) tensor.copy_(host.view(tensor.scalar_type()).view(tensor.sizes()));
    return true;
  }

  bool aborted_ = false;        // guarded by start_mutex()
  uint32_t elements_sent_ = 0;  // by messages of two parts; guarded by start_mutex()
  // Collectives. References to their works would keep their tensors.
  const std::shared_ptr<std::atomic<int>> under_way_ = std::make_shared<std::atomic<int>>(0);
};

BackendPtr connect(const Setup& setup) {
  auto options = ProcessGroupGloo::Options::create(setup.connect_by.left());
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  for (const auto& name : setup.gloo_devices.interfaces) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (options->devices.empty()) {
    options->devices.push_back(
        ProcessGroupGloo::createDeviceForHostname(setup.gloo_devices.address));
  }
  auto gloo = c10::make_intrusive<Gloo>(setup.store, setup.rank, setup.world_size, options);
  gloo->setTimeout(setup.timeout);
  return gloo;
}

}  // namespace

BackendPtr make_gloo(const Setup& setup) {
  const auto gloo = std::make_shared<BackendPtr>();
  const auto problem = problem_of([&] {
    // Left behind where the store does not answer.
    bounded(setup.store)->run([gloo, own = setup](const auto& store) mutable {
      own.store = store;
      *gloo = connect(own);
    });
  });
  DDP_CHECK(
      *gloo, "Gloo: expected rank ", setup.rank, " of ", setup.world_size,
      " to connect to the others over ", to_string(setup.gloo_devices), " within ",
      setup.connect_by.timeout().count(),
      " ms, but it could not. If that is not the way to them, set GLOO_SOCKET_IFNAME. (", problem,
      ")");
  return *gloo;
}

namespace {

// Gloo refuses the rest while it starts a collective, or in its wait().
const ReductionTable& reductions_of_gloo() {
  using Op = c10d::ReduceOp;
  static const ReductionTable table{
      {{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16},
       {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX}},
      {{at::kChar, at::kByte, at::kInt, at::kLong},
       {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX, Op::BAND, Op::BOR, Op::BXOR}}};
  return table;
}

}  // namespace

Description describe_gloo() {
  Description gloo;
  gloo.name = "gloo";
  gloo.devices = {"cpu", "cuda"};
  gloo.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.falls_back_to_gloo = true;
    capabilities.exchanges_lists = false;
    capabilities.reductions = &reductions_of_gloo();
    return capabilities;
  };
  gloo.make = make_gloo;
  return gloo;
}

}  // namespace ddp::backends
