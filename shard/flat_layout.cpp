#include <ddp/internal/flat_layout.h>

#include <algorithm>

namespace ddp {

FlatLayout::FlatLayout(const std::vector<int64_t>& numels, int ranks_) : offsets{0}, ranks(ranks_) {
  for (const auto numel : numels) offsets.push_back(offsets.back() + numel);
  const int64_t multiple = 4 * int64_t{ranks};
  shard_numel = (offsets.back() + multiple - 1) / multiple * 4;
}

std::vector<ShardPiece> FlatLayout::pieces(int rank) const {
  const int64_t begin = shard_numel * rank;
  const int64_t end = begin + shard_numel;
  std::vector<ShardPiece> pieces;
  for (size_t slot = 0; slot + 1 < offsets.size(); ++slot) {
    const auto first = std::max(offsets[slot], begin);
    const auto last = std::min(offsets[slot + 1], end);
    if (first < last) pieces.push_back({slot, first - offsets[slot], first - begin, last - first});
  }
  return pieces;
}

}  // namespace ddp
