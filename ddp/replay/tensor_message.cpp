#include "replay/tensor_message.h"

#include <memory>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Allocators begin memory at a multiple: on the host of 64 bytes, on a GPU of 512.
constexpr uint64_t kLine = 512;

/// The layout of a tensor.
struct Layout {
  bool is_defined = false;
  bool requires_grad = false;
  bool is_on_host = true;
  int dtype = 0;
  uint64_t offset = 0;  // of the address, in a line
  int64_t bytes = 0;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
};

std::string text_of(const Layout& layout) {
  return ddp::str(
      layout.is_defined, " ", layout.requires_grad, " ", layout.is_on_host, " ", layout.dtype, " ",
      layout.offset, " ", layout.bytes, " ", layout.sizes.size(), " ", joined_by(" ", layout.sizes),
      " ", joined_by(" ", layout.strides));
}

Layout layout_of(const std::string& text) {
  Layout layout;
  size_t dim = 0;
  InputText words(text);
  words >> layout.is_defined >> layout.requires_grad >> layout.is_on_host >> layout.dtype >>
      layout.offset >> layout.bytes >> dim;
  layout.sizes.resize(dim);
  layout.strides.resize(dim);
  for (auto& size : layout.sizes) words >> size;
  for (auto& stride : layout.strides) words >> stride;
  return layout;
}

Layout layout_of(const at::Tensor& tensor) {
  Layout layout;
  layout.is_defined = true;
  layout.requires_grad = tensor.requires_grad();
  layout.is_on_host = tensor.is_cpu();
  layout.dtype = static_cast<int>(tensor.scalar_type());
  layout.sizes = tensor.sizes().vec();
  layout.strides = tensor.strides().vec();
  if (tensor.numel() == 0) return layout;
  layout.offset = reinterpret_cast<uint64_t>(tensor.const_data_ptr()) % kLine;
  int64_t elements = 1;
  for (size_t d = 0; d < layout.sizes.size(); ++d) {
    elements += (layout.sizes[d] - 1) * layout.strides[d];
  }
  layout.bytes = elements * static_cast<int64_t>(tensor.element_size());
  return layout;
}

at::Tensor made_of(const Layout& layout, const at::Tensor& bytes, c10::Device device) {
  const auto place = layout.is_on_host ? c10::Device(at::kCPU) : device;
  const auto options = at::TensorOptions(static_cast<at::ScalarType>(layout.dtype)).device(place);
  if (layout.bytes == 0) return at::empty(layout.sizes, options);
  const auto room = static_cast<int64_t>(2 * kLine);
  auto memory = at::empty({layout.bytes + room}, options.dtype(at::kByte));
  const auto address = reinterpret_cast<uint64_t>(memory.data_ptr());
  const auto begin = static_cast<int64_t>((layout.offset + kLine - address % kLine) % kLine);
  memory.narrow(0, begin, layout.bytes).copy_(bytes);
  auto* data = static_cast<uint8_t*>(memory.data_ptr()) + begin;
  return at::from_blob(
      data, layout.sizes, layout.strides, [memory](void*) {}, options, place);
}

}  // namespace

void TensorMessage::add(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    layouts_.push_back(text_of(Layout()));
    return;
  }
  const bool is_plain = tensor.layout() == at::kStrided && !tensor.is_nested() &&
                        !tensor.is_quantized() && !tensor.is_meta() && !tensor.is_conj() &&
                        !tensor.is_neg();
  DDP_CHECK_VALUE(
      is_plain, "replay_every: expected tensors that have memory of their own values, got one of ",
      "layout ", tensor.layout(), " and dtype ", tensor.scalar_type(),
      " (or nested, meta, or a lazy conjugate). Leave replay_every out.");
  const auto layout = layout_of(tensor);
  layouts_.push_back(text_of(layout));
  if (layout.bytes == 0) return;
  // The program may change it before it is sent.
  const auto memory = at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), {layout.bytes}, [](void*) {},
      tensor.options().dtype(at::kByte).requires_grad(false), tensor.device());
  parts_.push_back(memory.to(at::kCPU, at::kByte, /*non_blocking=*/false, /*copy=*/true));
}

std::string TensorMessage::layout() const { return packed(layouts_); }

at::Tensor TensorMessage::bytes() const {
  return parts_.empty() ? at::empty({0}, at::kByte) : at::cat(parts_);
}

int64_t TensorMessage::size_of(const std::string& layout) {
  int64_t size = 0;
  for (const auto& text : unpacked(layout)) size += layout_of(text).bytes;
  return size;
}

std::vector<at::Tensor> TensorMessage::read(
    const std::string& layout, const at::Tensor& bytes, c10::Device device) {
  std::vector<at::Tensor> tensors;
  int64_t next = 0;
  for (const auto& text : unpacked(layout)) {
    const auto one = layout_of(text);
    if (!one.is_defined) {
      tensors.emplace_back();
      continue;
    }
    tensors.push_back(made_of(one, bytes.narrow(0, next, one.bytes), device));
    if (one.requires_grad) tensors.back().requires_grad_();
    next += one.bytes;
  }
  return tensors;
}

}  // namespace ddp
