#include "replicas/model_description.h"

#include <algorithm>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "precision/model_precision.h"

namespace ddp {
namespace {

constexpr const char* kBuildAlike =
    ". Build the model and its options from the same configuration on all ranks.";

std::string describe(const StateTensor& state) {
  const auto& t = state.tensor;
  std::string text = ddp::str(
      t.sizes(), " ", t.scalar_type(), ", strides ", t.strides(), ", on ", t.device().type());
  if (state.is_parameter) text += t.requires_grad() ? ", trained" : ", frozen";
  return text;
}

std::string describe_caps(const DistributedDataParallelOptions& options) {
  if (!options.bucket_cap_mb_list().empty()) return ddp::str(options.bucket_cap_mb_list());
  if (options.bucket_cap_mb() == kTuneBucketCap) return "tuned";
  return options.bucket_cap_mb() ? ddp::str(*options.bucket_cap_mb()) : "unset";
}

const char* yes_no(bool value) { return value ? "true" : "false"; }

}  // namespace

Description describe_model(
    const std::vector<StateTensor>& state, const std::vector<NamedParameter>& trained,
    const DistributedDataParallelOptions& options, const ProcessGroup& group) {
  Description items;
  for (const auto& s : state) {
    auto text = describe(s);
    const auto is_same = [&](const NamedParameter& p) { return p.tensor.is_same(s.tensor); };
    const auto found = std::find_if(trained.begin(), trained.end(), is_same);
    if (found != trained.end() && found->expect_sparse) text += ", with sparse gradients";
    items.push_back({s.is_parameter ? "parameter" : "buffer", printable(s.name), std::move(text)});
  }
  const auto option = [&](const char* name, std::string value) {
    items.push_back({"option", name, std::move(value)});
  };
  option("bucket_cap_mb", describe_caps(options));
  option("broadcast_buffers", yes_no(options.broadcast_buffers()));
  const auto syncs = options.forward_sync_buffers();
  option("forward_sync_buffers", syncs ? yes_no(*syncs) : "unset");
  option("find_unused_parameters", yes_no(options.find_unused_parameters()));
  const auto every = options.check_replicas_every();
  option("check_replicas_every", every ? std::to_string(*every) : "unset");
  option("static_graph", yes_no(options.static_graph()));
  option("mixed_precision", describe(options.mixed_precision()));
  constexpr const char* reductions[] = {"Mean", "Sum", "SampleWeighted"};
  option("reduction", reductions[static_cast<int>(options.reduction())]);
  if (!trained.empty()) {
    option(
        "buckets in the backend's memory (DDP_DISABLE_COMM_MEM)",
        yes_no(capabilities_of(*group, trained.front().tensor.device()).reduces_in_own_memory));
  }
  return items;
}

std::string describe_difference(const std::vector<Description>& by_rank) {
  const auto different = ranks_unlike_first(by_rank);
  if (different.empty()) return {};
  std::string text = "DistributedDataParallel: expected every rank to wrap the same model, but ";
  text += describe_item_difference(by_rank.front(), by_rank[different.front()], different.front());
  if (different.size() > 1) {
    text += ddp::str(" (", different.size(), " of ", by_rank.size(), " ranks differ from rank 0:");
    for (const size_t rank : different) text += ddp::str(" ", rank);
    text += ")";
  }
  return text + kBuildAlike;
}

void check_same_on_all_ranks(
    const char* subject, const Description& mine, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor) {
  const auto by_rank = gather_if_hashes_differ(subject, mine, error, group, monitor);
  if (by_rank.empty()) return;
  const auto difference = describe_difference(by_rank);
  DDP_CHECK(difference.empty(), difference);
}

}  // namespace ddp
