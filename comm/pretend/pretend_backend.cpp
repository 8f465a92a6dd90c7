#include "pretend/pretend_backend.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/rank_list.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backends/local_backend.h"
#include "rendezvous/wait_for_listener.h"
#include "store/tcp_store.h"

namespace ddp {
namespace {

using backends::BackendPtr;
using backends::Setup;

/// The result of a reduction over `n` ranks that all have the tensor.
void reduce_equal(at::Tensor t, const c10d::ReduceOp& op, int64_t n) {
  using Op = c10d::ReduceOp;
  switch (op.op_) {
    case Op::SUM:
      t.mul_(n);
      return;
    case Op::PREMUL_SUM: {
      const auto* factors = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factors->tensor_factor.defined()) {
        t.mul_(factors->tensor_factor).mul_(n);
      } else {
        t.mul_(factors->double_factor * static_cast<double>(n));
      }
      return;
    }
    case Op::PRODUCT:
      t.pow_(n);
      return;
    case Op::BXOR:
      if (n % 2 == 0) t.zero_();
      return;
    default:  // an average, the least, the largest, bits: the tensor's own
      return;
  }
}

class PretendBackend final : public backends::LocalBackend {
 public:
  PretendBackend(
      std::shared_ptr<PretendedJob> job, const Setup& setup, const std::string& name,
      const std::string& key)
      : LocalBackend(setup.rank, setup.world_size, name, setup.timeout),
        job_(std::move(job)),
        world_ranks_(setup.global_ranks.begin(), setup.global_ranks.end()),
        tag_seed_(fnv1a(key)) {
    const auto is_present = [&](int rank) { return job_->self.is_present(rank); };
    if (setup.world_size < 2 || !all_of(world_ranks_, is_present)) return;
    auto own = setup;
    own.store = c10::make_intrusive<c10d::PrefixStore>(
        ddp::str("group", key, '/', setup.group_name, '/', name), job_->store);
    own.required = true;
    own.parent = {};
    own.parent_ranks = {};
    const bool serves_hosts = name == "shm" || name == "gloo";
    real_ = backends::find(serves_hosts ? name : "gloo")->make(own);
    averages_ = name == "shm";
  }

  // NCCL's messages between ranks are batches, and others' are not.
  bool supportsCoalescing() const override { return getBackendName() == "nccl"; }
  void startCoalescing() override { batch_.clear(); }
  WorkPtr endCoalescing() override { return combine_works(std::exchange(batch_, {})); }

  void abort() override {
    if (real_) real_->abort();
    if (job_->messages) job_->messages->abort();
  }

  WorkPtr run(Collective c) override {
    if (real_) return run_for_real(std::move(c));
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    fill_results(c);
    return done(c.type, c.results());
  }

  WorkPtr send(Tensors& t, int dst, int tag) override {
    if (real_) return noted(real_->send(t, dst, tag));
    const int peer = world_ranks_[static_cast<size_t>(dst)];
    if (!job_->self.is_present(peer)) return noted(done(OpType::SEND, {}));
    return noted(job_->messages->send(t, place_of(peer), message_tag(tag)));
  }

  WorkPtr recv(Tensors& t, int src, int tag) override {
    if (real_) return noted(real_->recv(t, src, tag));
    const int peer = world_ranks_[static_cast<size_t>(src)];
    const bool is_there = job_->self.is_present(peer);
    if (!is_there && EqualMessages::are_expected()) return noted(done(OpType::RECV, t));
    if (!is_there) refuse_message(ddp::str("rank ", peer));
    return noted(job_->messages->recv(t, place_of(peer), message_tag(tag)));
  }

  WorkPtr recvAnysource(Tensors& t, int tag) override {
    if (!real_) refuse_message("any rank");
    return noted(real_->recvAnysource(t, tag));
  }

 private:
  WorkPtr run_for_real(Collective c) {
    if (c.op.op_ != c10d::ReduceOp::AVG || averages_) return run_on(*real_, std::move(c));
    c.op = c10d::ReduceOp::SUM;
    const auto results = c.results();
    const auto type = c.type;
    run_on(*real_, std::move(c))->wait();
    const at::NoGradGuard no_grad;
    for (const auto& t : results) at::Tensor(t).div_(size_);
    return done(type, results);
  }

  void fill_results(const Collective& c) {
    const bool is_root = c.root == rank_;
    switch (c.kind) {
      case Kind::AllReduce:
        for (const auto& t : c.in) reduce_equal(t, c.op, size_);
        return;
      case Kind::Reduce:
        if (is_root) reduce_equal(c.in[0], c.op, size_);
        return;
      case Kind::AllGather:
      case Kind::Gather:
        return repeat(c, c.in[0]);
      case Kind::Scatter:
        if (!is_root) {
          at::Tensor(c.out[0]).zero_();
          return;
        }
        copy(c.out[0], c.inputs()[static_cast<size_t>(rank_)]);
        return;
      case Kind::ReduceScatter:
        copy(c.outputs()[0], c.inputs()[static_cast<size_t>(rank_)]);
        return reduce_equal(c.outputs()[0], c.op, size_);
      case Kind::AllToAll:
        return exchange(c, c.inputs()[static_cast<size_t>(rank_)]);
      default:  // a broadcast: this rank has what the root sends
        return;
    }
  }

  static void copy(at::Tensor to, const at::Tensor& from) {
    if (!to.is_same(from)) to.copy_(from.reshape(to.sizes()));
  }

  /// Each rank's part of the result.
  void repeat(const Collective& c, const at::Tensor& own) {
    if (c.whole_out.defined()) {
      // The input may lie in the output.
      const auto from = own.reshape({1, -1}).clone();
      at::Tensor(c.whole_out).view({size_, -1}).copy_(from.expand({size_, -1}));
      return;
    }
    for (const auto& out : c.out) copy(out, own);
  }

  /// All other ranks send as this one does to itself; parts that differ in size repeat it.
  static void exchange(const Collective& c, const at::Tensor& own) {
    const auto from = own.reshape({-1}).clone();
    for (auto out : c.outputs()) {
      if (out.numel() == 0) continue;
      if (from.numel() == 0) {
        out.zero_();
        continue;
      }
      const auto times = (out.numel() + from.numel() - 1) / from.numel();
      out.copy_(from.repeat({times}).narrow(0, 0, out.numel()).view(out.sizes()));
    }
  }

  int place_of(int peer) const {
    const auto& present = job_->self.present;
    const auto found = std::lower_bound(present.begin(), present.end(), peer);
    return static_cast<int>(found - present.begin());
  }

  /// All groups send over one: so groups have tags of their own.
  int message_tag(int tag) const {
    return static_cast<int>(mixed(tag_seed_, static_cast<uint64_t>(tag)) & 0x3fffffff);
  }

  WorkPtr noted(WorkPtr work) {
    if (supportsCoalescing()) batch_.push_back(work);
    return work;
  }

  [[noreturn]] void refuse_message(const std::string& peer) const {
    const auto& self = job_->self;
    DDP_CHECK(
        false, "recv: expected a sender that is a process, got ", peer, " of a pretended job of ",
        self.world_size, " ranks, of which only ", self.present_text(), " exist, on rank ",
        self.rank, ". Add the other ranks of this group: ddprun --pretend ", self.world_size,
        " --ranks ", rank_list_text(world_ranks_), ". A pipeline needs one rank of each stage.");
  }

  const std::shared_ptr<PretendedJob> job_;
  const std::vector<int> world_ranks_;  // of the group's ranks
  const uint64_t tag_seed_;
  BackendPtr real_;        // null: other members are not there
  bool averages_ = false;  // real_
  std::vector<WorkPtr> batch_;
};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The lowest present rank listens.
StorePtr open_store(
    const PretendedRank& self, const Setup& setup, const std::string& address, int port) {
  const bool listens = self.rank == self.present.front();
  if (!listens) {
    const auto problem = wait_for_listener(address, port, setup.connect_by);
    DDP_CHECK(
        problem.empty(), "init_process_group: expected rank ", self.present.front(),
        " of the pretended job to answer at ", address, " port ", port, ", but rank ", self.rank,
        " did not reach it: ", problem, ". Check that it runs.");
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = listens;
  options.waitWorkers = false;
  options.timeout = setup.connect_by.left();
  return open_tcp_store(address, options);
}

}  // namespace

std::shared_ptr<PretendedJob> connect_present_ranks(
    const PretendedRank& self, const Setup& setup, const std::string& address, int port) {
  auto job = std::make_shared<PretendedJob>();
  job->self = self;
  if (self.present.size() < 2) return job;
  // One for all groups that this process makes one after the other: its port is taken once. Never
  // destroyed, because another rank may still make a group.
  static auto* const store = new StorePtr(open_store(self, setup, address, port));
  static std::atomic<int> jobs{0};
  job->store = c10::make_intrusive<c10d::PrefixStore>(ddp::str("job", ++jobs), *store);
  auto own = setup;
  own.store = c10::make_intrusive<c10d::PrefixStore>("messages", job->store);
  own.world_size = static_cast<int>(self.present.size());
  own.rank = static_cast<int>(
      std::lower_bound(self.present.begin(), self.present.end(), self.rank) - self.present.begin());
  own.group_name = "present ranks";
  own.global_ranks.assign(self.present.begin(), self.present.end());
  own.required = true;
  job->messages = backends::find("gloo")->make(own);
  return job;
}

BackendPtr make_pretend_backend(
    const std::shared_ptr<PretendedJob>& job, const Setup& setup, const std::string& name,
    const std::string& key) {
  return c10::make_intrusive<PretendBackend>(job, setup, name, key);
}

}  // namespace ddp
