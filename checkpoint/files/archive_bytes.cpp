#include "files/archive_bytes.h"

#include <cstring>
#include <exception>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>

#include <ddp/internal/prepared_load.h>
#include "python/torch_file.h"

namespace ddp {
namespace {

constexpr const char* kArchiveKey = "archive";

}  // namespace

c10::IValue archive_bytes(const std::function<void(torch::serialize::OutputArchive&)>& save) {
  torch::serialize::OutputArchive archive;
  save(archive);
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  auto dict = make_dict();
  dict.insert(kArchiveKey, tensor);
  return dict;
}

bool is_archive_bytes(const c10::IValue& value) {
  if (!value.isGenericDict()) return false;
  const auto* bytes = find_in(value, kArchiveKey);
  return bytes != nullptr && bytes->isTensor() && bytes->toTensor().scalar_type() == at::kByte;
}

void read_archive_bytes(
    const c10::IValue& value, const std::string& subject,
    const std::function<void(torch::serialize::InputArchive&)>& load) {
  const auto bytes = find_in(value, kArchiveKey)->toTensor().contiguous();
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(
        static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
    load(archive);
  } catch (const std::exception& error) {
    DDP_CHECK(false, subject, ": ", text_of(error));
  }
}

}  // namespace ddp
