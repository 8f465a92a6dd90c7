#include <ddp/internal/tensors_on_host.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

// Blocks double up to the latter: LibTorch's allocator rounds up to powers of two. A larger tensor
// has a block of its own.
constexpr int64_t kFirstSharedBytes = int64_t{1} << 20;
constexpr int64_t kMostSharedBytes = int64_t{64} << 20;
constexpr int64_t kCopyAlignment = 64;

// Pinned memory of one TensorsToDevice.
constexpr int64_t kUploadedAtOnce = int64_t{64} << 20;

at::Tensor bytes_of_dense(const at::Tensor& tensor) { return tensor.flatten().view(at::kByte); }

}  // namespace

at::Tensor pinned_bytes(int64_t count) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  try {
    return at::empty({count}, options.pinned_memory(true));
  } catch (const c10::Error&) {
    return at::empty({count}, options);
  }
}

TensorsOnHost::~TensorsOnHost() {
  if (!devices_.empty()) problem_of([this] { wait(); });
}

std::shared_ptr<TensorsOnHost::Block> TensorsOnHost::room_for(int64_t bytes) {
  for (const auto& block : blocks_) {
    if (block->used + bytes <= block->bytes.numel()) return block;
  }
  const auto shared = blocks_.empty() ? kFirstSharedBytes : 2 * blocks_.back()->bytes.numel();
  const auto size = std::max(bytes, std::min(shared, kMostSharedBytes));
  blocks_.push_back(std::make_shared<Block>(Block{pinned_bytes(size)}));
  return blocks_.back();
}

at::Tensor TensorsOnHost::copy(const at::Tensor& given, Order order) {
  const c10::NoGradGuard no_grad;
  const auto tensor = given.detach().resolve_conj().resolve_neg();
  const bool keeps_strides = order == Order::AsItLies && tensor.is_non_overlapping_and_dense();
  if (tensor.is_cpu()) {
    return tensor.clone(keeps_strides ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
  }
  const auto bytes = static_cast<int64_t>(tensor.numel()) * tensor.element_size();
  const auto block = room_for(bytes);
  const auto offset = block->used;
  block->used = at::round_up(offset + bytes, kCopyAlignment);
  const auto place = block->bytes.narrow(0, offset, bytes).view(tensor.scalar_type());
  const auto strides =
      keeps_strides ? c10::DimVector(tensor.strides()) : c10::contiguous_strides(tensor.sizes());
  place.as_strided(tensor.sizes(), strides).copy_(tensor, /*non_blocking=*/true);
  devices_.emplace(tensor.device().type(), tensor.device().index());
  // A storage of its own, which a file has as a whole.
  return at::from_blob(
      place.data_ptr(), tensor.sizes(), strides, [block](void*) {},
      at::TensorOptions().dtype(tensor.scalar_type()));
}

void TensorsOnHost::copy_into(const at::Tensor& place, const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  place.copy_(tensor, /*non_blocking=*/true);
  if (!tensor.is_cpu()) devices_.emplace(tensor.device().type(), tensor.device().index());
}

void TensorsOnHost::wait() {
  std::vector<c10::Event> ends;
  for (const auto& [type, index] : std::exchange(devices_, {})) {
    ends.emplace_back(type).record(current_stream_of(c10::Device(type, index)));
  }
  for (auto& end : ends) end.synchronize();
}

TensorsToDevice::TensorsToDevice(c10::Device device, int64_t bytes)
    : device_(device), piece_(pinned_bytes(std::min(bytes, kUploadedAtOnce))) {}

TensorsToDevice::~TensorsToDevice() {
  if (used_ > 0) problem_of([this] { wait(); });
}

at::Tensor TensorsToDevice::copy(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const auto from = bytes_of_dense(tensor.detach().contiguous());
  auto copy = at::empty(tensor.sizes(), tensor.options().device(device_).requires_grad(false));
  const auto to = bytes_of_dense(copy);
  for (int64_t at = 0; at < from.numel();) {
    if (used_ == piece_.numel()) wait();
    const auto count = std::min(from.numel() - at, piece_.numel() - used_);
    const auto part = piece_.narrow(0, used_, count);
    part.copy_(from.narrow(0, at, count));
    to.narrow(0, at, count).copy_(part, /*non_blocking=*/true);
    used_ += count;
    at += count;
  }
  return copy;
}

void TensorsToDevice::wait() {
  c10::Event end(device_.type());
  end.record(current_stream_of(device_));
  end.synchronize();
  used_ = 0;
}

}  // namespace ddp
