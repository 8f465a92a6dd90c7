#include "shards/shard_file.h"

#include <exception>
#include <utility>

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/prepared_load.h>

#include "python/pickle_reader.h"

namespace ddp {

namespace {

void check_byte_order(caffe2::serialize::PyTorchStreamReader& reader) {
  constexpr const char* kRecord = "byteorder";
  if (!reader.hasRecord(kRecord)) return;
  const auto [data, size] = reader.getRecord(kRecord);
  const std::string order(static_cast<const char*>(data.get()), size);
  DDP_CHECK(order == "little", "expected numbers in little byte order, got ", order);
}

/// Ranges of a record can be read where zip stored it as it is. Others' programs compress.
void check_uncompressed(
    const caffe2::serialize::FileAdapter& file, size_t header, const std::string& record) {
  constexpr size_t kMethodAt = 8;  // in the record's local header
  uint16_t method = 1;
  file.read(header + kMethodAt, &method, sizeof method);
  DDP_CHECK(
      method == 0, "expected records that are not compressed, got ", record,
      " compressed. Save the file again by torch.save");
}

}  // namespace

ShardFile::ShardFile(std::string path) : path_(std::move(path)) {
  const InputFile readable(path_);  // or its error says why it is not
  try {
    file_ = std::make_shared<caffe2::serialize::FileAdapter>(path_);
    caffe2::serialize::PyTorchStreamReader reader(file_);
    const auto [pickle, size] = reader.getRecord("data.pkl");
    const std::string text(static_cast<const char*>(pickle.get()), size);
    check_byte_order(reader);
    dict_ = read_pickle(text, [&](const std::string& key) {
      const auto record = "data/" + key;
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), static_cast<int64_t>(reader.getRecordSize(record)),
          at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr, /*resizable=*/false);
      check_uncompressed(*file_, reader.getRecordHeaderOffset(record), record);
      begin_of_storage_[storage.unsafeGetStorageImpl()] = reader.getRecordOffset(record);
      return storage;
    });
  } catch (const std::exception& error) {
    DDP_CHECK(false, path_, ": expected a file of torch.save, got another: ", text_of(error));
  }
}

void ShardFile::read_bytes(const at::Tensor& recorded, int64_t first, int64_t count, void* to) {
  const auto begin = begin_of_storage_.at(recorded.storage().unsafeGetStorageImpl());
  const auto at =
      begin + static_cast<size_t>(recorded.storage_offset() + first) * recorded.itemsize();
  const auto bytes = static_cast<size_t>(count) * recorded.itemsize();
  size_t got = 0;
  try {
    if (!is_open()) file_ = std::make_shared<caffe2::serialize::FileAdapter>(path_);
    got = file_->read(at, to, bytes);
  } catch (const std::exception& error) {
    DDP_CHECK(false, path_, ": ", text_of(error));
  }
  DDP_CHECK(got == bytes, path_, ": expected ", bytes, " bytes, got ", got, ". Copy it again.");
}

// A tensor whose elements are not row by row, as Python writes a transposed one: reads the range
// with all of them.
at::Tensor ShardFile::read_strided(const at::Tensor& recorded, const TensorBox& part) {
  int64_t count = 1;
  for (int64_t d = 0; d < recorded.dim(); ++d) count += (recorded.size(d) - 1) * recorded.stride(d);
  const auto memory = at::empty({count}, recorded.scalar_type());
  read_bytes(recorded, 0, count, memory.mutable_data_ptr());
  return box_view(memory.as_strided(recorded.sizes(), recorded.strides()), part).contiguous();
}

at::Tensor ShardFile::read(
    const std::string& key, at::ScalarType dtype, const TensorBox& whole, const TensorBox& part) {
  const auto* found = find_in(dict_, key);
  DDP_CHECK(
      found != nullptr && found->isTensor() && found->toTensor().sizes() == whole.size &&
          found->toTensor().scalar_type() == dtype,
      path_, ": expected ", kind_text({dtype, whole.size}), " under \"", key,
      "\", got none. Load another checkpoint.");
  const auto& recorded = found->toTensor();
  if (c10::multiply_integers(part.size) == 0) return at::empty(part.size, dtype);
  if (!recorded.is_contiguous()) return read_strided(recorded, part);
  auto tensor = at::empty(part.size, dtype);
  auto* to = static_cast<char*>(tensor.mutable_data_ptr());
  for (const auto& run : runs_of(part, whole)) {
    read_bytes(recorded, run.first, run.count, to);
    to += static_cast<size_t>(run.count) * recorded.itemsize();
  }
  return tensor;
}

}  // namespace ddp
