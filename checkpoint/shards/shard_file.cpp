#include "shards/shard_file.h"

#include <exception>
#include <utility>

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/prepared_load.h>

#include "python/pickle_reader.h"

namespace ddp {

ShardFile::ShardFile(std::string path) : path_(std::move(path)) {
  try {
    file_ = std::make_shared<caffe2::serialize::FileAdapter>(path_);
    caffe2::serialize::PyTorchStreamReader reader(file_);
    const auto [pickle, size] = reader.getRecord("data.pkl");
    const std::string text(static_cast<const char*>(pickle.get()), size);
    dict_ = read_pickle(text, [&](const std::string& key) {
      const auto record = "data/" + key;
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), static_cast<int64_t>(reader.getRecordSize(record)),
          at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr, /*resizable=*/false);
      // Records are not compressed, so that their ranges can be read.
      begin_of_storage_[storage.unsafeGetStorageImpl()] = reader.getRecordOffset(record);
      return storage;
    });
  } catch (const std::exception& error) {
    DDP_CHECK(false, path_, ": ", text_of(error));
  }
}

at::Tensor ShardFile::read(
    const std::string& key, at::ScalarType dtype, const Box& whole, const Box& part) {
  const auto* found = dict_.isGenericDict() ? find_in(dict_, key) : nullptr;
  DDP_CHECK(
      found != nullptr && found->isTensor() && found->toTensor().sizes() == whole.size &&
          found->toTensor().scalar_type() == dtype && found->toTensor().is_contiguous(),
      path_, ": expected ", kind_text({dtype, whole.size}), " row by row under \"", key,
      "\", got none. Load another checkpoint.");
  const auto& recorded = found->toTensor();
  const auto begin = begin_of_storage_.at(recorded.storage().unsafeGetStorageImpl());
  auto tensor = at::empty(part.size, dtype);
  auto* to = static_cast<char*>(tensor.mutable_data_ptr());
  try {
    for (const auto& run : runs_of(part, whole)) {
      const auto bytes = static_cast<size_t>(run.count) * recorded.itemsize();
      const auto first = static_cast<size_t>(recorded.storage_offset() + run.first);
      const auto count = file_->read(begin + first * recorded.itemsize(), to, bytes);
      DDP_CHECK(count == bytes, "expected ", bytes, " bytes, got ", count, ". Copy it again.");
      to += bytes;
    }
  } catch (const std::exception& error) {
    DDP_CHECK(false, path_, ": ", text_of(error));
  }
  return tensor;
}

}  // namespace ddp
