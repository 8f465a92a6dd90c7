#include <ddp/seed_all.h>

#include <ATen/Context.h>
#include <ddp/internal/hash.h>

namespace ddp {

void seed_all(uint64_t seed, const GroupArg& group) {
  const auto rank = static_cast<uint64_t>(group.get()->getRank());
  at::manual_seed(mix_bits(mix_bits(seed) + rank));
}

}  // namespace ddp
