// The storages of deferred tensors. They have the size of the values in bytes, and no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace ddp {

class Tape;

/// Where a storage's values are recorded.
struct RecordedSlot {
  std::shared_ptr<Tape> tape;
  size_t slot = 0;
  bool deferred = true;  // false: the memory is still the storage's own
};

/// \return  null for a storage of no tape.
const RecordedSlot* recorded_slot(const c10::StorageImpl& storage);
const RecordedSlot* recorded_slot(const at::Tensor& tensor);
/// The same, and null where the storage has its own memory.
const RecordedSlot* deferred_slot(const at::Tensor& tensor);

/// A storage without memory. Reading its data throws an error with this text.
c10::Storage make_deferred_storage(
    const RecordedSlot& slot, size_t nbytes, c10::Device device, std::string error);
/// Marks a storage that has memory as one that a tape may take.
void mark_storage(c10::StorageImpl& storage, const RecordedSlot& slot);
/// Takes the mark back.
void unmark_storage(c10::StorageImpl& storage);
/// Takes the memory of a storage, marked or not, which becomes a deferred one.
c10::Storage take_memory(c10::StorageImpl& storage, const RecordedSlot& slot, std::string error);
/// Gives a deferred storage the memory of `values`, which has none after that.
void give_memory(c10::StorageImpl& storage, const c10::Storage& values);

/// Gives a deferred tensor, whose storage has this stand-in, the sizes and strides of `like`.
void resize_deferred(const at::Tensor& tensor, const at::Tensor& like, const c10::Storage& standin);

/// A tensor with the sizes, strides, offset and dtype of `like` on this storage.
at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like);
c10::Storage allocate_storage(size_t nbytes, c10::Device device);

}  // namespace ddp
