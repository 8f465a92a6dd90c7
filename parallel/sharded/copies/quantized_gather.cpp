#include "sharded/copies/quantized_gather.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ddp/collectives.h>
#include <ddp/internal/current_stream.h>

namespace ddp {

QuantizedGather::QuantizedGather(ProcessGroup group, int64_t shard_numel)
    : group_(std::move(group)),
      row_(shard_numel, /*rows=*/1, kGatherBlock, /*has_zero_points=*/false) {}

void QuantizedGather::begin(const at::Tensor& shard) {
  own_ = encode_rows(shard.to(at::kFloat), /*rows=*/1, row_, {});
  if (group_->getSize() == 1) {
    all_ = own_;
    return;
  }
  all_ = at::empty({group_->getSize(), row_.bytes()}, own_.options());
  work_ = all_gather_into_tensor_async(all_, own_, group_);
}

void QuantizedGather::end(const at::Tensor& whole) {
  if (work_) std::exchange(work_, nullptr)->wait();
  const bool is_float = whole.scalar_type() == at::kFloat;
  const auto values =
      is_float ? whole : at::empty(whole.sizes(), whole.options().dtype(at::kFloat));
  decode_rows(all_, row_, values);
  if (!is_float) at::Tensor(whole).copy_(values);
  record_use(own_);  // begin() may have run on another stream
  record_use(all_);
  all_.reset();
}

at::Tensor QuantizedGather::own_values(at::ScalarType dtype) const {
  const auto values = at::empty({row_.share}, own_.options().dtype(at::kFloat));
  decode_rows(own_, row_, values);
  return values.to(dtype);
}

void QuantizedGather::forget() { own_.reset(); }

}  // namespace ddp
