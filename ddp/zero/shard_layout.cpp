#include "shard_layout.h"

#include <algorithm>

#include <ATen/ops/empty_strided.h>
#include <ddp/internal/gradient_layout.h>

namespace ddp {

std::vector<ShardPiece> pieces_of(const std::vector<int64_t>& numels, int64_t size, int rank) {
  const int64_t begin = size * rank;
  const int64_t end = begin + size;
  std::vector<ShardPiece> pieces;
  int64_t offset = 0;
  for (size_t slot = 0; slot < numels.size(); ++slot) {
    const auto first = std::max(offset, begin);
    const auto last = std::min(offset + numels[slot], end);
    if (first < last) pieces.push_back({slot, first - offset, first - begin, last - first});
    offset += numels[slot];
  }
  return pieces;
}

std::vector<std::vector<at::Tensor>> chunks_of(
    const std::vector<at::Tensor>& parameters, int64_t bytes) {
  struct Open {
    std::vector<at::Tensor> parameters;
    int64_t bytes = 0;
  };
  std::vector<Open> open;  // one for each dtype and device
  std::vector<std::vector<at::Tensor>> chunks;
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    const auto is_alike = [&](const Open& o) {
      const auto& first = o.parameters.front();
      return first.scalar_type() == p->scalar_type() && first.device() == p->device();
    };
    auto found = std::find_if(open.begin(), open.end(), is_alike);
    if (found == open.end()) found = open.insert(open.end(), Open{});
    found->parameters.push_back(*p);
    found->bytes += static_cast<int64_t>(p->nbytes());
    if (found->bytes < bytes) continue;
    chunks.push_back(std::move(found->parameters));
    open.erase(found);
  }
  for (auto& o : open) chunks.push_back(std::move(o.parameters));
  return chunks;
}

at::Tensor memory_order_of(const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto strides = gradient_strides(parameter);
  const auto alike =
      tensor.strides() == at::IntArrayRef(strides)
          ? tensor
          : at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
  return alike.as_strided({tensor.numel()}, {1});
}

}  // namespace ddp
