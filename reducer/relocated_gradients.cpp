#include "relocated_gradients.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "gradient_kind.h"

namespace ddp {
namespace {

// Bytes of a gradient that are copied in the time that it takes to move the tensor, about.
constexpr size_t kWorthMoving = size_t{16} << 10;

// Puts `t` where `place` lies: it stays the same tensor, for all code that has it.
void relocate(const at::Tensor& t, const at::Tensor& place) {
  // On a device what reads the old memory may still be to come, on a stream that is not its own.
  if (!t.is_cpu()) {
    const c10::impl::VirtualGuardImpl device(t.device().type());
    device.recordDataPtrOnStream(t.storage().data_ptr(), device.getStream(t.device()));
  }
  auto* tensor = t.unsafeGetTensorImpl();
  tensor->set_allow_tensor_metadata_change(true);
  tensor->set_storage_keep_dtype(place.storage());
  tensor->set_storage_offset(place.storage_offset());
}

// Not from memory that other tensors have too, nor from what is not torch's, where other code wants
// to find the average, nor with a graph (create_graph).
bool can_relocate(const at::Tensor& grad, const at::Tensor& view) {
  return grad.nbytes() >= kWorthMoving && grad.strides() == view.strides() &&
         grad.storage().use_count() == 1 && grad.storage().resizable() && !grad.requires_grad() &&
         !grad.is_neg() && !grad.is_conj();
}

// Gradients of which user code has a view, or may have, stay in the storage; so do all where one
// lies in another's place, put there by hand.
//
// Returns whether nothing but the bucket's own tensors is left in the storage.
bool relocate_out(const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
  if (storage.foreign_tensors() == 0) return true;
  std::vector<size_t> relocated;
  for (size_t slot = 0; slot < parameters.size(); ++slot) {
    const at::Tensor& grad = parameters[slot].mutable_grad();
    if (!grad.defined() || !storage.contains(grad)) continue;
    if (!storage.has_in_place(slot, grad)) return false;
    relocated.push_back(slot);
  }
  if (storage.foreign_tensors() > relocated.size()) return false;
  for (const size_t slot : relocated) {
    relocate(parameters[slot].mutable_grad(), storage.views()[slot].clone());
  }
  return true;
}

}  // namespace

bool RelocatedGradients::vacate(BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
  if (storage.foreign_tensors() == 0) return false;
  copies_only_ = true;
  if (relocate_out(storage, parameters)) return false;
  storage.reallocate();
  return true;
}

void RelocatedGradients::put(
    at::Tensor& grad, const BucketStorage& storage, size_t slot, const at::Tensor& reduced) {
  const auto& view = storage.views()[slot];
  const bool in_storage = storage.contains(reduced);
  const auto source = in_storage ? view : storage.view_into(reduced, slot);
  const bool relocates = in_storage && !copies_only_;
  if (!grad.defined() || !is_like(grad, source)) {
    // A gradient of another kind was a problem, and counted as zeros.
    grad = relocates ? share_memory(source) : source.clone();
  } else if (relocates && can_relocate(grad, view)) {
    relocate(grad, source);
    grad.unsafeGetTensorImpl()->bump_version();
  } else {
    overwrite(grad, source);
  }
}

void RelocatedGradients::move_out(
    const BucketStorage& storage, const std::vector<at::Tensor>& parameters) {
  relocate_out(storage, parameters);
}

}  // namespace ddp
