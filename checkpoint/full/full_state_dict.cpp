#include <ddp/full_state_dict.h>

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/text.h>

#include "checkpointer/peers.h"
#include "full/whole_tensors.h"
#include "shards/shard_index.h"

namespace ddp {
namespace {

constexpr const char* kFullStateDict = "full_state_dict";

/// Whether a rank gives a box. In a pretended job all ranks seem to have the same ones.
bool is_gathered(const ShardLayout& shard) {
  return is_pretended() ? c10::multiply_integers(shard.box.size) > 0 : is_written(shard);
}

/// Sends this rank's boxes of one tensor after the other to the rank that gathers them.
class FullGather {
 public:
  FullGather(ProcessGroup group, int to, const OwnParts& own, const WholeTensors& whole)
      : group_(std::move(group)), to_(to), device_(carrier_device(*group_)) {
    by_rank_.resize(whole.ranks.size());
    for (size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      for (const auto& shard : whole.ranks[rank]) {
        if (is_gathered(shard)) by_rank_[rank][shard.name].push_back(shard.box);
      }
    }
    // own.parts has the order of this rank's layouts, and lacks only the tensors without a box.
    size_t part = 0;
    for (const auto& shard : whole.ranks[static_cast<size_t>(group_->getRank())]) {
      if (part == own.parts.size() || own.parts[part].name != shard.name) continue;
      if (is_gathered(shard)) views_[shard.name].push_back(own.parts[part].view);
      ++part;
    }
  }

  /// Returns the whole tensor on the rank that gathers, and nothing on the other ranks.
  at::Tensor gather(const NamedKind& tensor) const {
    if (is_pretended()) return own_boxes(tensor);
    if (group_->getRank() != to_) {
      send_views(tensor);
      return {};
    }
    auto all = at::empty(tensor.kind.sizes, tensor.kind.dtype);
    for (size_t rank = 0; rank < by_rank_.size(); ++rank) {
      const auto found = by_rank_[rank].find(tensor.name);
      if (found == by_rank_[rank].end()) continue;
      const auto& boxes = found->second;
      const auto values = static_cast<int>(rank) == to_
                              ? views_.at(tensor.name)
                              : receive(static_cast<int>(rank), boxes, tensor.kind.dtype);
      for (size_t i = 0; i < boxes.size(); ++i) box_view(all, boxes[i]).copy_(values[i]);
    }
    return all;
  }

 private:
  using BoxesByName = std::map<std::string, std::vector<TensorBox>>;

  /// With zeros in the place of other ranks' boxes, of which a pretended job knows nothing.
  at::Tensor own_boxes(const NamedKind& tensor) const {
    const auto self = static_cast<size_t>(group_->getRank());
    const auto all = at::zeros(tensor.kind.sizes, tensor.kind.dtype);
    const auto views = views_.find(tensor.name);
    const auto boxes = by_rank_[self].find(tensor.name);
    if (views == views_.end() || boxes == by_rank_[self].end()) return all;
    for (size_t i = 0; i < boxes->second.size(); ++i)
      box_view(all, boxes->second[i]).copy_(views->second[i]);
    return all;
  }

  void send_views(const NamedKind& tensor) const {
    const auto found = views_.find(tensor.name);
    if (found == views_.end()) return;
    int64_t elements = 0;
    for (const auto& view : found->second) elements += view.numel();
    const auto memory = at::empty({elements}, at::dtype(tensor.kind.dtype).device(device_));
    int64_t at = 0;
    for (const auto& view : found->second) {
      memory.narrow(0, at, view.numel()).view(view.sizes()).copy_(view);
      at += view.numel();
    }
    send(memory.view(at::kByte), to_, /*tag=*/0, group_);
  }

  std::vector<at::Tensor> receive(
      int from, const std::vector<TensorBox>& boxes, at::ScalarType dtype) const {
    int64_t elements = 0;
    for (const auto& box : boxes) elements += c10::multiply_integers(box.size);
    const auto memory = at::empty({elements}, at::dtype(dtype).device(device_));
    auto bytes = memory.view(at::kByte);
    recv(bytes, from, /*tag=*/0, group_);
    std::vector<at::Tensor> values;
    int64_t at = 0;
    for (const auto& box : boxes) {
      const auto count = c10::multiply_integers(box.size);
      values.push_back(memory.narrow(0, at, count).view(box.size));
      at += count;
    }
    return values;
  }

  const ProcessGroup group_;
  const int to_;
  const at::Device device_;
  std::vector<BoxesByName> by_rank_;                      // that each rank gives
  std::map<std::string, std::vector<at::Tensor>> views_;  // of this rank's
};

// Throws on every rank.
WholeTensors agree_on_tensors(
    const OwnParts& own, const std::string& problem, int to, const ProcessGroup& group,
    GroupMonitor& monitor) {
  WholeTensors whole;
  agree(
      packed({problem, std::to_string(to), to_text(own)}), group, kFullStateDict,
      [&](const std::vector<std::string>& by_rank) {
        const auto texts = texts_by_position<3>(by_rank);
        auto text = first_problem(texts[0]);
        if (!text.empty()) return text;
        const auto& ranks_to = texts[1];
        if (const auto rank = first_different_rank(ranks_to); rank > 0) {
          return ddp::str(
              kFullStateDict, ": expected the same rank `to` on all, got ", ranks_to[0],
              " on rank 0 and ", ranks_to[rank], " on rank ", rank, " of ", ranks_to.size(),
              ". Pass the same.");
        }
        return problem_of([&] {
          whole = whole_tensors(kFullStateDict, texts[2]);
          if (!is_pretended()) (void)owners_of({kFullStateDict, ""}, whole.ranks);
        });
      },
      &monitor);
  return whole;
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> full_state_dict(
    const torch::nn::Module& module, int to, const GroupArg& given) {
  const c10::NoGradGuard no_grad;
  const auto group = given.get();
  const auto monitor = monitor_of(group);
  monitor->settle_job();
  OwnParts own;
  const auto problem = problem_of([&] {
    DDP_CHECK_VALUE(
        to >= 0 && to < group->getSize(), kFullStateDict, ": expected a rank from 0 to ",
        group->getSize() - 1, ", got ", to, ". Pass the rank that gets the dictionary.");
    own = own_parts_of(module, Values::ToSave);
  });
  const auto whole = agree_on_tensors(own, problem, to, group, *monitor);

  torch::OrderedDict<std::string, at::Tensor> dict;
  const auto gathering = [] { return std::string("full_state_dict: gathering the tensors"); };
  monitor->abort_on_error(gathering, [&] {
    const FullGather gather(group, to, own, whole);
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : whole.tensors) tensors.push_back(gather.gather(tensor));
    if (group->getRank() != to) return;
    for (const auto& [name, number] : whole.names) dict.insert(name, tensors[number]);
  });
  return dict;
}

}  // namespace ddp
