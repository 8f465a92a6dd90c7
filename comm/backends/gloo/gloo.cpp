// The only file that includes ProcessGroupGloo.hpp, and so the only one compiled with shim/.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/ScopeExit.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/check.h>
#include <ddp/internal/owner_process.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "backends/gloo/gloo.h"
#include "backends/gloo/message.h"
#include "backends/message_check.h"
#include "base/deadline.h"
#include "calls/collective_call.h"
#include "store/bounded_store.h"
#include "work/collective_handle.h"

namespace ddp::backends {
namespace {

using c10d::ProcessGroupGloo;

// c10d's flight recorder looks up a group's entry, and creates it, without a lock. So the groups of
// a process start one call at a time. The mutex is recursive because some calls start others.
std::recursive_mutex& start_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

/// ProcessGroupGloo with these differences:
///   - threads may start collectives in several groups at once
///   - messages of different collectives are not matched: see tag_with()
///   - the handle of a reduce-scatter behaves like the other handles: see reduce_part()
///   - an all-to-all whose parts are not what the other rank expects is an error: see exchange()
///   - abort() fails the pending collectives and all later ones, and does not wait for their end
///   - sends and receives use the group's timeout, not the timeout of connecting, and can be
///     polled; messages describe themselves, see MessageHeader
class Gloo : public Uniform<ProcessGroupGloo> {
 public:
  using Base = ProcessGroupGloo;
  using Uniform::Uniform;

  // An exchange uses members of this class, which go before the threads do.
  ~Gloo() override {
    if (!owner_.is_this_one()) return;
    constexpr std::chrono::milliseconds kPoll{1};
    while (*pending_exchanges_ > 0) std::this_thread::sleep_for(kPoll);
  }

  WorkPtr run(Collective c) override {
    return begin([&] {
      tag_with(c.described());
      return start(c);
    });
  }

  WorkPtr send(Tensors& t, int dst, int tag) override {
    check_message("send", t, tag);
    return begin([&]() -> WorkPtr {
      const auto works = send_message(t[0].cpu(), dst, tag);
      const auto transfer = [works](const GlooPointToPoint::Wait& wait) {
        return all_of(works, wait);
      };
      return c10::make_intrusive<GlooPointToPoint>(works[0], transfer, options_->timeout);
    });
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    check_message("recv", t, tag);
    return receive(t[0], src, tag);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    check_message("recv", t, tag);
    auto work = receive(t[0], std::nullopt, tag);
    // The sender of a long message may wait until its elements are received, and the packet says
    // from whom. So a thread of its own receives both, because the caller may do something else
    // before it waits.
    if (!fits_in_packet(t[0])) static_cast<GlooPointToPoint&>(*work).start();
    return work;
  }

  // It uses the count of collectives as the tag of its messages, to which tag_with() adds a hash.
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    {
      const std::lock_guard lock(start_mutex());
      collectiveCounter_ &= kCountMask;
    }
    Base::monitoredBarrier(o, wait_all_ranks);
  }

  // ProcessGroupGloo has no abort(): its base class does nothing.
  void abort() override {
    if (!owner_.is_this_one()) return;
    const std::lock_guard lock(start_mutex());
    if (std::exchange(aborted_, true)) return;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) close_connection(peer);
    }
    keep_alive_until_idle();
  }

 private:
  // Gloo matches the ranks' messages by the kind of collective and a tag, which c10d takes from a
  // count of collectives. If a message meets a buffer of another size, Gloo throws on its own
  // thread, which ends the process; if the sizes are equal, one dtype is summed as another. So half
  // of the tag is a hash of the call: messages of different calls wait for each other, until the
  // monitors of the waiting ranks find the difference. The other 16 bits count more collectives
  // than are pending at a time.
  static constexpr uint32_t kCountMask = 0xffff;
  void tag_with(const CollectiveCall& call) {
    collectiveCounter_ = (static_cast<uint32_t>(call.hash() >> 32) & ~kCountMask) |
                         (collectiveCounter_ & kCountMask);
  }

  WorkPtr start(const Collective& c) {
    auto in = c.in, out = c.out;
    auto whole = c.whole_out;
    std::vector<Tensors> of_each;
    switch (c.kind) {
      case Kind::AllReduce:
        if (c.type == OpType::ALLREDUCE) {
          return Base::allreduce(in, c.options<c10d::AllreduceOptions>());
        }
        return Base::allreduce_coalesced(in, c.options<c10d::AllreduceCoalescedOptions>());
      case Kind::Broadcast:
        return Base::broadcast(in, c.options<c10d::BroadcastOptions>());
      case Kind::Reduce:
        return Base::reduce(in, c.options<c10d::ReduceOptions>());
      case Kind::AllGather:
        if (whole.defined()) {
          return Base::DDP_ALL_GATHER_SINGLE(whole, in[0], c.options<c10d::AllgatherOptions>());
        }
        of_each = {out};
        return Base::allgather(of_each, in, c.options<c10d::AllgatherOptions>());
      case Kind::Gather:
        if (!out.empty()) of_each = {out};
        return Base::gather(of_each, in, c.options<c10d::GatherOptions>());
      case Kind::Scatter:
        if (!in.empty()) of_each = {in};
        return Base::scatter(out, of_each, c.options<c10d::ScatterOptions>());
      case Kind::ReduceScatter:
        return reduce_parts(c);
      case Kind::AllToAll:
        return exchange(c);
      default:
        return Base::barrier(c.options<c10d::BarrierOptions>());
    }
  }

  // A reduce-scatter, which Gloo does not have: an all-reduce of everything, as in
  // ProcessGroupGloo. But ProcessGroupGloo's handle is complete only once its wait() has returned,
  // never if it throws, and has no future.
  WorkPtr reduce_parts(const Collective& c) {
    const auto own = static_cast<size_t>(rank_);
    at::Tensor all, part;
    if (c.whole_in.defined()) {
      all = c.whole_in.reshape({-1}).clone();
      part = all.tensor_split(size_)[own];
    } else {
      Tensors parts;
      std::vector<int64_t> numels;
      for (const auto& in : c.in) {
        parts.push_back(in.reshape({-1}));
        numels.push_back(in.numel());
      }
      all = at::cat(parts);
      part = all.split_with_sizes(numels)[own];
    }
    Tensors tensors{all};
    const auto work =
        begin([&] { return Base::allreduce(tensors, c.options<c10d::AllreduceOptions>()); });
    const auto copy_part = [to = c.out[0], part] { at::Tensor(to).copy_(part.view(to.sizes())); };
    return handle_of({{work}, copy_part, c.out});
  }

  /// Starts to send a packet, and the elements of a long message.
  ///
  /// \param tensor  on the CPU.
  std::vector<WorkPtr> send_message(const at::Tensor& tensor, int to, int tag) {
    Tensors packet{make_packet(tensor)};
    std::vector<WorkPtr> works{Base::send(packet, to, tag)};
    if (fits_in_packet(tensor)) return works;
    Tensors elements{tensor};
    works.push_back(Base::send(elements, to, elements_tag(tensor, tag)));
    return works;
  }

  /// The part of an all-to-all that another rank sends.
  struct ReceivedPart {
    int source;
    at::Tensor output, host;  // the same on the CPU
    at::Tensor packet;
    WorkPtr packet_arrived, elements_arrived;  // null for a short part
  };

  /// The end of an all-to-all, on one of Gloo's threads.
  class Exchange : public AsyncWork {
   public:
    Exchange(Gloo& gloo, Tensors from, Tensors to, std::chrono::milliseconds timeout)
        : AsyncWork(
              gloo.contexts_[0], {to}, c10d::OpType::ALLTOALL_BASE, ++gloo.seq_, timeout,
              "gloo:all_to_all", from),
          gloo_(gloo),
          pending_(gloo.pending_exchanges_),
          from_(std::move(from)),
          to_(std::move(to)) {}

    void run() override {
      const auto ended = c10::make_scope_exit([this] { --*pending_; });
      const Deadline deadline(timeout_);
      const auto wait = [&](const WorkPtr& work) {
        DDP_CHECK_WITH(DistBackendError, work->wait(deadline.left()), "all_to_all was aborted");
      };
      for (const auto& part : received) {
        wait(part.packet_arrived);
        gloo_.check_part(part);
        part.elements_arrived ? wait(part.elements_arrived) : copy_elements(part.packet, part.host);
        if (!part.host.is_same(part.output)) at::Tensor(part.output).copy_(part.host);
      }
      for (const auto& work : sent) wait(work);
    }
    const Tensors getInputTensors() override { return from_; }
    const Tensors getOutputTensors() override { return to_; }

    std::vector<WorkPtr> sent;
    std::vector<ReceivedPart> received;

   private:
    Gloo& gloo_;
    const std::shared_ptr<std::atomic<int>> pending_;
    const Tensors from_, to_;
  };

  // An all-to-all, made of messages: in Gloo's, a part of another size than the receiver expects
  // would end the process.
  WorkPtr exchange(const Collective& c) {
    const auto timeout = c.timeout == c10d::kUnsetTimeout ? options_->timeout : c.timeout;
    auto on_host = c;
    if (c.whole_in.defined()) on_host.whole_in = c.whole_in.cpu();  // in one copy
    const auto inputs = on_host.inputs(), outputs = c.outputs();
    auto exchange = c10::make_intrusive<Exchange>(*this, inputs, c.results(), timeout);
    const int tag = kAllToAllTag + static_cast<int>(c.first().scalar_type());
    for (int peer = 0; peer < size_; ++peer) {
      const auto& output = outputs[static_cast<size_t>(peer)];
      const auto& input = inputs[static_cast<size_t>(peer)];
      if (peer == rank_) {
        at::Tensor(output).copy_(input.reshape(output.sizes()));
        continue;
      }
      for (auto& work : send_message(input.cpu().contiguous(), peer, tag)) {
        exchange->sent.push_back(std::move(work));
      }
      exchange->received.push_back(receive_part(output, peer, tag));
    }
    ++*pending_exchanges_;
    enqueue(exchange);
    return exchange;
  }

  ReceivedPart receive_part(const at::Tensor& output, int source, int tag) {
    const bool in_place = output.is_cpu() && output.is_contiguous();
    const auto host =
        in_place ? output : at::empty(output.sizes(), output.options().device(at::kCPU));
    ReceivedPart part{source, output, host, empty_packet(), {}, {}};
    Tensors packet{part.packet};
    part.packet_arrived = Base::recv(packet, source, tag);
    if (!fits_in_packet(output)) part.elements_arrived = receive_elements(host, source, tag);
    return part;
  }

  void check_part(const ReceivedPart& part) {
    const auto header = header_of(part.packet);
    if (header.numel == part.output.numel()) return;
    abort();  // as check_received()
    DDP_CHECK(
        false,
        "all_to_all: expected every rank to receive as many elements as are sent to it, but rank ",
        part.source, " sends ", header.numel, " to rank ", rank_, ", which expects ",
        part.output.numel(),
        ". Let the output splits on each rank be the other ranks' input splits for it.");
  }

  // Checks for abort(): Gloo would fail too, but with an error about another call.
  template <typename Call>
  WorkPtr begin(const Call& call) {
    owner_.check("Gloo");
    const std::lock_guard lock(start_mutex());
    DDP_CHECK_WITH(
        DistBackendError, !aborted_,
        "Gloo: expected a working process group, but its connections were closed on rank ", rank_,
        ", by abort() or after a failure that was reported before. Make a new group.");
    auto work = call();
    // Counts the works that the destructor waits for: Gloo's own, not those made of them.
    if (dynamic_cast<AsyncWork*>(work.get())) {
      ++*pending_works_;
      work->getFuture()->addCallback([count = pending_works_](c10::ivalue::Future&) { --*count; });
    }
    return work;
  }

  // Gloo drops a send whose connection breaks while Gloo writes to it (seen in its ring
  // all-reduce). The send ends with its timeout, and the destructor waits until then. So a separate
  // thread holds the last reference until no work is pending.
  void keep_alive_until_idle() {
    if (*pending_works_ == 0) return;
    auto self = c10::intrusive_ptr<Gloo>::unsafe_reclaim_from_nonowning(this);
    try {
      std::thread([self = std::move(self)] {
        constexpr std::chrono::milliseconds kPoll{10};
        while (*self->pending_works_ > 0) std::this_thread::sleep_for(kPoll);
      }).detach();
    } catch (const std::system_error&) {
      // A thread cannot start: the destructor waits instead.
    }
  }

  // Uses a receive for which no rank sends. The first receive that times out makes Gloo close all
  // connections of its context, and fail the calls that use them, pending or later. Closing the
  // connections directly would fail the pending calls only, and not those that wait for one of
  // Gloo's threads.
  void close_connection(int peer) {
    for (size_t i = 0; i < contexts_.size(); ++i) {
      Tensors nothing{at::empty({1}, at::kByte)};
      const int tag = std::numeric_limits<int>::max() - static_cast<int>(i);
      try {
        Base::recv(nothing, peer, tag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // The timeout.
      }
    }
  }

  // \param src  the sender; unset: any rank.
  WorkPtr receive(const at::Tensor& tensor, std::optional<int> src, int tag) {
    auto self = c10::intrusive_ptr<Gloo>::unsafe_reclaim_from_nonowning(this);
    const auto host =
        tensor.is_cpu() ? tensor : at::empty_like(tensor, tensor.options().device(at::kCPU));
    return begin([&]() -> WorkPtr {
      Tensors packet{empty_packet()};
      const WorkPtr first = src ? Base::recv(packet, *src, tag) : Base::recvAnysource(packet, tag);
      WorkPtr elements;
      if (src && !fits_in_packet(tensor)) elements = receive_elements(host, *src, tag);
      auto transfer = [self, first, elements, packet = packet[0], host, tensor,
                       tag](const GlooPointToPoint::Wait& wait) {
        if (!wait(first)) return false;
        self->check_received(packet, tensor, first->sourceRank(), tag);
        if (fits_in_packet(tensor)) {
          copy_elements(packet, host);
        } else {
          const auto second =
              elements ? elements : self->receive_elements(host, first->sourceRank(), tag);
          if (!wait(second)) return false;
        }
        if (!tensor.is_cpu()) at::Tensor(tensor).copy_(host);
        return true;
      };
      return c10::make_intrusive<GlooPointToPoint>(first, std::move(transfer), options_->timeout);
    });
  }

  WorkPtr receive_elements(const at::Tensor& host, int source, int tag) {
    Tensors elements{host};
    return begin([&] { return Base::recv(elements, source, elements_tag(host, tag)); });
  }

  // After an error the two ranks no longer agree on what comes next, and a later message could
  // arrive in the memory of this receive. So the error ends the group.
  void check_received(const at::Tensor& packet, const at::Tensor& tensor, int source, int tag) {
    const auto problem = problem_of_message(header_of(packet), tensor, source, tag, rank_, size_);
    if (problem.empty()) return;
    abort();
    DDP_CHECK(false, problem);
  }

  const OwnerProcess owner_{};
  bool aborted_ = false;  // guarded by start_mutex()
  // Pending collectives. A count, because references to their works would keep their tensors alive.
  const std::shared_ptr<std::atomic<int>> pending_works_ = std::make_shared<std::atomic<int>>(0);
  const std::shared_ptr<std::atomic<int>> pending_exchanges_ =
      std::make_shared<std::atomic<int>>(0);
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
  BackendPtr gloo;
  const auto problem = problem_of([&] {
    auto in_time = setup;
    in_time.store = bounded(setup.store);
    gloo = connect(in_time);
  });
  DDP_CHECK(
      gloo, "Gloo: expected rank ", setup.rank, " of ", setup.world_size,
      " to connect to the others over ", to_string(setup.gloo_devices), " within ",
      setup.connect_by.timeout().count(),
      " ms, but it could not. If that is not the way to them, set GLOO_SOCKET_IFNAME. (", problem,
      ")");
  return gloo;
}

namespace {

// Gloo refuses other reductions when it starts a collective, or in its wait().
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

RegisteredBackend describe_gloo() {
  RegisteredBackend gloo;
  gloo.name = "gloo";
  gloo.devices = {"cpu", "cuda"};
  gloo.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.falls_back_to_gloo = true;
    capabilities.reductions = &reductions_of_gloo();
    return capabilities;
  };
  gloo.make = make_gloo;
  return gloo;
}

}  // namespace ddp::backends
