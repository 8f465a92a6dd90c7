#include "zero/host_staging.h"

#include <set>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

constexpr int64_t kStagingAlignment = 64;  // of vector instructions

int64_t staged_bytes(const at::Tensor& tensor) {
  return at::round_up(static_cast<int64_t>(tensor.nbytes()), kStagingAlignment);
}

std::set<c10::DeviceIndex> indices_of(const std::vector<StagedPiece>& pieces) {
  std::set<c10::DeviceIndex> indices;
  for (const auto& piece : pieces) indices.insert(piece.parameter.device().index());
  return indices;
}

}  // namespace

void HostStaging::place(size_t window, std::vector<StagedPiece> pieces) {
  auto& slot = this->slot(window);
  slot.pieces = std::move(pieces);
  slot.values.clear();
  slot.gradients.clear();
  if (slot.pieces.empty()) return;
  int64_t bytes = 0;
  for (const auto& piece : slot.pieces) bytes += 2 * staged_bytes(piece.parameter);
  if (!slot.memory.defined() || slot.memory.numel() < bytes) {
    slot.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  int64_t offset = 0;
  const auto next_like = [&](const at::Tensor& tensor) {
    const auto size = static_cast<int64_t>(tensor.nbytes());
    auto memory = slot.memory.narrow(0, offset, size).view(tensor.scalar_type());
    offset += staged_bytes(tensor);
    return memory;
  };
  for (auto& piece : slot.pieces) {
    slot.values.push_back(next_like(piece.parameter));
    slot.gradients.push_back(next_like(piece.parameter));
    piece.value.set_data(slot.values.back());
  }
}

void HostStaging::fetch(size_t window, std::vector<StagedPiece> pieces) {
  auto& slot = this->slot(window);
  // The window before last may still go up, on another stream.
  for (const auto index : indices_of(pieces)) {
    const c10::Device device(pieces.front().parameter.device().type(), index);
    for (auto& event : slot.copied) event.block(current_stream_of(device));
  }
  place(window, std::move(pieces));
  for (size_t i = 0; i < slot.pieces.size(); ++i) {
    slot.values[i].copy_(slot.pieces[i].parameter, /*non_blocking=*/true);
    slot.gradients[i].copy_(slot.pieces[i].gradient, /*non_blocking=*/true);
  }
  record(slot);
}

const std::vector<at::Tensor>& HostStaging::await(size_t window) {
  auto& slot = this->slot(window);
  for (auto& event : slot.copied) event.synchronize();
  return slot.gradients;
}

void HostStaging::put(size_t window) {
  auto& slot = this->slot(window);
  for (size_t i = 0; i < slot.pieces.size(); ++i) {
    slot.pieces[i].parameter.copy_(slot.values[i], /*non_blocking=*/true);
  }
  record(slot);
  slot.pieces.clear();  // which keep gradients
}

void HostStaging::record(Slot& slot) {
  if (slot.pieces.empty()) return;
  slot.copied.clear();
  for (const auto index : indices_of(slot.pieces)) {
    const c10::Device device(slot.pieces.front().parameter.device().type(), index);
    slot.copied.emplace_back(device.type()).record(current_stream_of(device));
  }
}

}  // namespace ddp
