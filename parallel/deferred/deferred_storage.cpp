#include "deferred/deferred_storage.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

// LibTorch can make a storage refuse access with a text, and has no way back. This is one: naming a
// private member is allowed in an explicit instantiation.
using StorageFlag = bool c10::StorageImpl::*;
StorageFlag refuses_access();
template <StorageFlag flag>
struct FlagOfStorage {
  friend StorageFlag refuses_access() { return flag; }
};
template struct FlagOfStorage<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// The context of a marked storage's memory.
struct Mark {
  RecordedSlot slot;
  c10::DataPtr own;  // the memory, until it is taken
};

void delete_mark(void* mark) { delete static_cast<Mark*>(mark); }

Mark* mark_of(const c10::StorageImpl& storage) {
  auto& data = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_mark ? static_cast<Mark*>(data.get_context()) : nullptr;
}

c10::DataPtr marked_pointer(
    const RecordedSlot& slot, bool deferred, c10::DataPtr own, c10::Device device) {
  auto* data = own.get();
  auto* mark = new Mark{slot, std::move(own)};
  mark->slot.deferred = deferred;
  return {data, mark, &delete_mark, device};
}

}  // namespace

const RecordedSlot* recorded_slot(const c10::StorageImpl& storage) {
  const auto* mark = mark_of(storage);
  return mark != nullptr ? &mark->slot : nullptr;
}

const RecordedSlot* recorded_slot(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return recorded_slot(*tensor.storage().unsafeGetStorageImpl());
}

const RecordedSlot* deferred_slot(const at::Tensor& tensor) {
  const auto* slot = recorded_slot(tensor);
  return slot != nullptr && slot->deferred ? slot : nullptr;
}

c10::Storage make_deferred_storage(
    const RecordedSlot& slot, size_t nbytes, c10::Device device, std::string error) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), nbytes, marked_pointer(slot, true, {}, device),
      c10::GetAllocator(device.type()), /*resizable=*/true);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(error));
  return storage;
}

void mark_storage(c10::StorageImpl& storage, const RecordedSlot& slot) {
  auto own = storage.set_data_ptr({});
  const auto device = own.device();
  storage.set_data_ptr_noswap(marked_pointer(slot, false, std::move(own), device));
}

void unmark_storage(c10::StorageImpl& storage) {
  auto own = std::move(mark_of(storage)->own);
  storage.set_data_ptr_noswap(std::move(own));
}

c10::Storage take_memory(c10::StorageImpl& storage, const RecordedSlot& slot, std::string error) {
  auto* mark = mark_of(storage);
  auto own = mark != nullptr ? std::move(mark->own) : storage.set_data_ptr({});
  const auto device = own.device();
  storage.set_data_ptr_noswap(marked_pointer(slot, true, {}, device));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(error));
  return {
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(own), storage.allocator(),
      /*resizable=*/true};
}

void give_memory(c10::StorageImpl& storage, const c10::Storage& values) {
  storage.*refuses_access() = false;
  storage.set_nbytes(values.nbytes());
  storage.set_data_ptr_noswap(values.unsafeGetStorageImpl()->set_data_ptr({}));
}

void resize_deferred(
    const at::Tensor& tensor, const at::Tensor& like, const c10::Storage& standin) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), tensor.storage_offset());
  const auto bytes = at::detail::computeStorageNbytes(
      like.sizes(), like.strides(), like.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  for (auto* storage : {tensor.storage().unsafeGetStorageImpl(), standin.unsafeGetStorageImpl()}) {
    storage->set_nbytes(std::max(storage->nbytes(), bytes));
  }
}

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like) {
  const auto device = storage.device();
  const auto key = c10::computeDispatchKey(like.scalar_type(), c10::Layout::Strided, device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

c10::Storage allocate_storage(size_t nbytes, c10::Device device) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  return at::empty({static_cast<int64_t>(nbytes)}, options).storage();
}

}  // namespace ddp
