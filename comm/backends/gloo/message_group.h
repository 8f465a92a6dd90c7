#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/setup.h"

namespace ddp::backends {

/// A group whose messages take the connections of another group's Gloo. Its end does not close
/// them, so it says itself what has ended.
struct MessageGroup {
  uint64_t key = 1;             // not 0; differs between the groups over one Gloo
  std::vector<int> gloo_ranks;  // by rank of this group
  int rank = 0;
  std::atomic<std::chrono::milliseconds> timeout{};
  /// Why this rank sends and receives no more in the group; "" while it does.
  std::function<std::string()> why_ended;
  /// Why that rank does not; "" while it does. Its last messages may still be on their way.
  std::function<std::string(int rank)> why_left;
  /// Ends the group on all ranks.
  std::function<void(const std::string& why)> fail;

  int size() const { return static_cast<int>(gloo_ranks.size()); }
  /// The rank in this group of one in Gloo's.
  int rank_of(int gloo_rank) const {
    const auto found = std::find(gloo_ranks.begin(), gloo_ranks.end(), gloo_rank);
    return static_cast<int>(found - gloo_ranks.begin());
  }
};
using MessageGroupPtr = std::shared_ptr<MessageGroup>;

/// c10d's send, and recv or (without a source) recvAnysource, in that group.
///
/// \param gloo  of make_gloo().
c10::intrusive_ptr<c10d::Work> send_in_group(
    c10d::Backend& gloo, const MessageGroupPtr& group, std::vector<at::Tensor>& tensors, int dst,
    int tag);
c10::intrusive_ptr<c10d::Work> receive_in_group(
    c10d::Backend& gloo, const MessageGroupPtr& group, std::vector<at::Tensor>& tensors,
    std::optional<int> src, int tag);

}  // namespace ddp::backends
