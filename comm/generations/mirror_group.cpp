// The group of a process that waits to join an elastic job.
#include <memory>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/elastic_errors.h>
#include <ddp/internal/check.h>
#include <ddp/internal/membership/generations.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backends/local_backend.h"
#include "group/backend_spec.h"
#include "group/group_builder.h"
#include "group/monitored_group.h"
#include "monitor/job_monitor.h"

namespace ddp {
namespace {

using c10d::ReduceOp;

/// Sends nothing: every other rank would have called with the same tensors.
class MirrorBackend : public backends::LocalBackend {
 public:
  MirrorBackend(int rank, int size, std::chrono::milliseconds timeout)
      : LocalBackend(rank, size, "mirror", timeout) {}

  WorkPtr send(Tensors& /*t*/, int /*dst*/, int /*tag*/) override { refuse("send"); }
  WorkPtr recv(Tensors& /*t*/, int /*src*/, int /*tag*/) override { refuse("recv"); }
  WorkPtr recvAnysource(Tensors& /*t*/, int /*tag*/) override { refuse("recv"); }

  WorkPtr run(Collective c) override {
    const auto own = static_cast<size_t>(getRank());
    const auto in = c.inputs(), outputs = c.outputs();
    switch (c.kind) {
      case Kind::Scatter:
        refuse("scatter");
      case Kind::AllGather:
      case Kind::Gather:
        for (const auto& out : outputs) overwrite(out, in[0]);
        break;
      case Kind::ReduceScatter:
        overwrite(outputs[0], in[own]);
        reduce_in_place(outputs[0], c.op);
        break;
      case Kind::AllToAll:
        for (const auto& out : outputs) {
          if (out.numel() != in[own].numel()) refuse("all_to_all_single of unequal parts");
          overwrite(out, in[own]);
        }
        break;
      case Kind::AllReduce:
      case Kind::Reduce:
        for (const auto& tensor : outputs) reduce_in_place(tensor, c.op);
        break;
      default:  // a broadcast, a barrier
        break;
    }
    return done(c.type, c.results());
  }

 private:
  /// Reduces `size` equal values.
  void reduce_in_place(const at::Tensor& tensor, const ReduceOp& op) const {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    switch (op.op_) {
      case ReduceOp::SUM:
        if (tensor.scalar_type() != at::kBool) tensor.mul_(getSize());
        return;
      case ReduceOp::PRODUCT:
        if (tensor.scalar_type() != at::kBool) tensor.pow_(getSize());
        return;
      case ReduceOp::BXOR:
        if (getSize() % 2 == 0) tensor.zero_();
        return;
      case ReduceOp::PREMUL_SUM:
        refuse("PREMUL_SUM");
      default:  // the average, the least, ...: the value itself
        return;
    }
  }
  static void overwrite(const at::Tensor& to, const at::Tensor& from) {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.copy_(from.reshape(to.sizes()));
  }
  [[noreturn]] static void refuse(const char* call) {
    throw readable_error<c10::Error>(
        DDP_HERE, ddp::str(
                      call,
                      ": expected a group of ranks that train, got a process that waits to join "
                      "them. Call it inside of Elastic::loop(), or in Elastic::on_change()."));
  }
};

}  // namespace

GenerationBackends generation_backends(const std::string& backend) {
  std::string unknown;  // another rank may have registered it: meeting tells
  const auto spec = parse_backend(backend, /*gpus_are_usable=*/true, &unknown);
  GenerationBackends found;
  found.carries_cpu = !unknown.empty() || spec.count("cpu") > 0;
  found.picks_device = device_picker(spec).has_value();
  return found;
}

std::string take_own_device(const ProcessGroupOptions& options) {
  return make_own_device_current(options);
}

ProcessGroup make_mirror_group(
    int rank, int size, std::chrono::milliseconds timeout, const std::string& backend) {
  constexpr const char* kName = "default_pg";
  JobMonitor::Setup job;
  job.rank = rank;
  job.size = size;
  job.generation.number = -1;
  job.generation.report = [](const std::string& why, const FindBlamed&) { return why; };
  GroupRecipe recipe;
  recipe.timeout = timeout;
  recipe.world_ranks = numbers_up_to(size);
  recipe.job = std::make_shared<JobMonitor>(std::move(job));
  recipe.is_mirror = true;
  const auto group = MonitoredGroup::make(c10::make_intrusive<c10d::HashStore>(), rank, size);
  const auto mirror = c10::make_intrusive<MirrorBackend>(rank, size, timeout);
  for (const auto& [device, _] : parse_backend(backend, /*gpus_are_usable=*/true)) {
    group->setBackend(device_type_of(device), c10d::ProcessGroup::BackendType::CUSTOM, mirror);
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(kName);
  group->setGroupDesc(kName);
  group->start_monitor(std::move(recipe), /*key=*/"");
  return group;
}

void end_mirror_group(const ProcessGroup& group) {
  const auto& own = dynamic_cast<const MonitoredGroup&>(*group);
  own.recipe().job->end_generation(
      GenerationEnd::RankLost, "this process has joined the ranks that train");
}

}  // namespace ddp
