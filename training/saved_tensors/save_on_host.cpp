#include <ddp/save_on_host.h>

#include <ddp/internal/text.h>

#include "saved_tensors/saved_tensor_hooks.h"

namespace ddp {
namespace {

bool moves(const at::Tensor& tensor) {
  return !tensor.is_cpu() && !tensor.is_meta() && can_be_replaced(tensor);
}

}  // namespace

struct save_on_host::Impl {
  // The hooks end before the counts do, and are called on this thread alone.
  Stats stats;
  CopiesToHost copies;
  const SavedTensorHooks hooks{[this](const at::Tensor& tensor) {
    if (!moves(tensor)) {
      ++stats.kept;
      return keep_as_it_is(tensor);
    }
    ++stats.copied;
    stats.bytes += static_cast<int64_t>(tensor.numel()) * tensor.element_size();
    return copies.add(tensor);
  }};
};

save_on_host::save_on_host() : impl_(std::make_unique<Impl>()) {}

save_on_host::~save_on_host() = default;

save_on_host::Stats save_on_host::stats() const { return impl_->stats; }

std::string summary(const save_on_host::Stats& stats) {
  return ddp::str(
      stats.copied, " tensors copied, ", mib_text(stats.bytes), ", ", stats.kept, " kept");
}

}  // namespace ddp
