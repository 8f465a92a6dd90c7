#include "python/torch_file.h"

#include <exception>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <ddp/internal/check.h>
#include <ddp/internal/map_leaves.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <ddp/internal/file_io.h>
#include "python/pickle_reader.h"

namespace ddp {
namespace {

constexpr const char* kPickleRecord = "data.pkl";
constexpr const char* kByteOrderRecord = "byteorder";

std::string tensor_record(const std::string& key) { return "data/" + key; }

/// Copies the tensors of a tree of values.
class HostCopy {
 public:
  explicit HostCopy(TensorsOnHost& copies) : on_host_(copies) {}
  c10::IValue of(const c10::IValue& value) {
    return map_leaves(value, [&](const c10::IValue& leaf) {
      return leaf.isTensor() ? c10::IValue(of(leaf.toTensor())) : leaf;
    });
  }

 private:
  using View = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>, int>;

  at::Tensor of(const at::Tensor& tensor) {
    DDP_CHECK_VALUE(
        tensor.layout() == at::kStrided && !tensor.is_quantized(),
        "Checkpointer: expected tensors with a dense storage, got a ", tensor.layout(),
        tensor.is_quantized() ? " quantized" : "", " one. Save what it is made from.");
    const View view{
        tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
        tensor.strides().vec(), static_cast<int>(tensor.scalar_type())};
    auto& copy = copies_[view];
    if (!copy.defined()) {
      copy = on_host_.copy(tensor, TensorsOnHost::Order::AsItLies);
    }
    return copy;
  }

  TensorsOnHost& on_host_;
  std::map<View, at::Tensor> copies_;
};

}  // namespace

c10::impl::GenericDict make_dict(
    std::initializer_list<std::pair<c10::IValue, c10::IValue>> entries) {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, value] : entries) dict.insert(key, value);
  return dict;
}

c10::impl::GenericList make_list() { return c10::impl::GenericList(c10::AnyType::get()); }

c10::IValue copy_to_host(const c10::IValue& value, TensorsOnHost& copies) {
  return HostCopy(copies).of(value);
}

c10::IValue copy_to_host(const c10::IValue& value) {
  TensorsOnHost copies;
  auto copied = copy_to_host(value, copies);
  copies.wait();
  return copied;
}

at::Tensor LazyTensors::add(const TensorKind& kind, Read read) {
  const auto elements = c10::multiply_integers(kind.sizes);
  const auto bytes = elements * static_cast<int64_t>(c10::elementSize(kind.dtype));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, at::DataPtr(nullptr, at::kCPU), /*allocator=*/nullptr,
      /*resizable=*/false);
  reads_[storage.unsafeGetStorageImpl()] = std::move(read);
  auto placeholder = at::empty({0}, kind.dtype);
  return placeholder.set_(storage, 0, kind.sizes, c10::contiguous_strides(kind.sizes));
}

at::Tensor LazyTensors::read(const at::Tensor& placeholder) const {
  const auto found = reads_.find(placeholder.storage().unsafeGetStorageImpl());
  if (found == reads_.end()) return {};
  auto tensor = found->second();
  TORCH_INTERNAL_ASSERT(
      tensor.is_cpu() && tensor.is_contiguous() && tensor.sizes() == placeholder.sizes() &&
      tensor.scalar_type() == placeholder.scalar_type());
  return tensor;
}

void write_torch_file(const c10::IValue& value, const ByteSink& sink, const LazyTensors* lazy) {
  std::string pickle;
  torch::jit::Pickler pickler(
      [&](const char* data, size_t size) { pickle.append(data, size); },
      /*tensor_table=*/nullptr, /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
      /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();

  // The writer's destructor ends the archive, and must not see an exception: one that the sink or a
  // read throws is kept here until the writer is destroyed.
  std::exception_ptr failure;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
      if (!failure) failure = exception_of([&] { sink(data, size); });
      return size;
    });
    constexpr std::string_view kOrder = "little";
    writer.writeRecord(kPickleRecord, pickle.data(), pickle.size());
    writer.writeRecord(kByteOrderRecord, kOrder.data(), kOrder.size());
    size_t key = 0;
    for (const auto& tensor : pickler.tensorData()) {
      at::Tensor read;
      try {
        if (lazy != nullptr) read = lazy->read(tensor);
      } catch (...) {
        failure = std::current_exception();
        break;
      }
      const auto& storage = tensor.storage();
      const auto* data = read.defined() ? read.const_data_ptr() : storage.data();
      writer.writeRecord(tensor_record(std::to_string(key++)), data, storage.nbytes());
      if (failure) break;
    }
    writer.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
}

void replace_torch_file(
    const std::string& path, const std::function<c10::IValue()>& value, const LazyTensors* lazy) {
  replace_file(path, [&](OutputFile& file) {
    write_torch_file(
        value(), [&](const void* data, size_t size) { file.write(data, size); }, lazy);
  });
}

namespace {

std::string record_text(caffe2::serialize::PyTorchStreamReader& reader, const std::string& name) {
  const auto [data, size] = reader.getRecord(name);
  return std::string(static_cast<const char*>(data.get()), size);
}

c10::IValue read_records(caffe2::serialize::PyTorchStreamReader& reader) {
  DDP_CHECK(
      !reader.hasRecord("constants.pkl"),
      "expected a file of torch.save, got one of LibTorch's torch::save or of TorchScript. Load it "
      "with torch::load.");
  DDP_CHECK(
      reader.hasRecord(kPickleRecord), "expected a file of torch.save, got an archive without \"",
      kPickleRecord, "\". Check whether it is the right file.");
  if (reader.hasRecord(kByteOrderRecord)) {
    const auto order = record_text(reader, kByteOrderRecord);
    DDP_CHECK(
        order == "little", "expected numbers in little-endian order, got \"", order,
        "\". Save the file again on a little-endian machine.");
  }
  const auto pickle = record_text(reader, kPickleRecord);
  return read_pickle(pickle, [&](const std::string& key) {
    auto [data, size] = reader.getRecord(tensor_record(key));
    return c10::Storage(
        c10::Storage::use_byte_size_t(), static_cast<int64_t>(size), std::move(data),
        /*allocator=*/nullptr, /*resizable=*/false);
  });
}

}  // namespace

c10::IValue read_torch_file(const std::string& path) {
  DDP_CHECK(
      kind_of_path(path) == PathKind::File, path, ": expected a file of torch.save, got ",
      kind_of_path(path) == PathKind::Folder ? "a folder" : "nothing", ". Name a file.");
  std::optional<caffe2::serialize::PyTorchStreamReader> reader;
  try {
    reader.emplace(path);
  } catch (const std::exception& error) {
    DDP_CHECK(false, path, ": expected a file of torch.save, got another: ", text_of(error));
  }
  try {
    return read_records(*reader);
  } catch (const std::exception& error) {
    DDP_CHECK(false, path, ": ", text_of(error));
  }
  return {};
}

}  // namespace ddp
