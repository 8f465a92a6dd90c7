#include "elastic/flat_state.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

namespace ddp::elastic {
namespace {

template <typename Number>
void put_number(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void put_text(std::string& text, const std::string& value) {
  put_number(text, value.size());
  text += value;
}

class Writer {
 public:
  explicit Writer(FlatState& flat) : flat_(flat) {}

  void write(const c10::IValue& value) {
    auto& text = flat_.text;
    if (value.isTensor()) {
      write_tensor(value.toTensor());
    } else if (value.isNone()) {
      text += 'n';
    } else if (value.isBool()) {
      text += value.toBool() ? 't' : 'f';
    } else if (value.isInt()) {
      text += 'i';
      put_number(text, value.toInt());
    } else if (value.isDouble()) {
      text += 'd';
      put_number(text, value.toDouble());
    } else if (value.isString()) {
      text += 's';
      put_text(text, value.toStringRef());
    } else if (value.isTuple()) {
      write_all('(', value.toTupleRef().elements().vec());
    } else if (value.isList()) {
      write_all('[', value.toListRef().vec());
    } else if (value.isGenericDict()) {
      write_dict(value.toGenericDict());
    } else {
      DDP_CHECK_VALUE(
          false,
          "Elastic: expected a state of tensors, numbers, strings, lists and dictionaries, "
          "got ",
          value.tagKind(), ".");
    }
  }

 private:
  void write_tensor(const at::Tensor& tensor) {
    auto& text = flat_.text;
    text += tensor.defined() ? 'T' : 'U';
    if (!tensor.defined()) return;
    put_number(text, static_cast<int8_t>(tensor.scalar_type()));
    put_number(text, tensor.dim());
    for (const auto size : tensor.sizes()) put_number(text, size);
    flat_.tensors.push_back(tensor.detach());
  }
  void write_all(char kind, const std::vector<c10::IValue>& values) {
    flat_.text += kind;
    put_number(flat_.text, values.size());
    for (const auto& value : values) write(value);
  }
  void write_dict(const c10::impl::GenericDict& dict) {
    flat_.text += '{';
    put_number(flat_.text, dict.size());
    for (const auto& entry : dict) {
      write(entry.key());
      write(entry.value());
    }
  }

  FlatState& flat_;
};

class Reader {
 public:
  Reader(const std::string& text, std::vector<at::Tensor>& tensors)
      : text_(text), tensors_(tensors) {}

  c10::IValue read() {
    switch (get<char>()) {
      case 'T':
        return read_tensor();
      case 'U':
        return at::Tensor();
      case 't':
        return true;
      case 'f':
        return false;
      case 'i':
        return get<int64_t>();
      case 'd':
        return get<double>();
      case 's':
        return read_text();
      case '(':
        return c10::ivalue::Tuple::create(read_all());
      case '[': {
        c10::impl::GenericList list(c10::AnyType::get());
        for (auto& value : read_all()) list.push_back(std::move(value));
        return list;
      }
      case '{':
        return read_dict();
      default:
        return {};
    }
  }

 private:
  template <typename Number>
  Number get() {
    Number number;
    TORCH_INTERNAL_ASSERT(at_ + sizeof(number) <= text_.size());
    std::memcpy(&number, text_.data() + at_, sizeof(number));
    at_ += sizeof(number);
    return number;
  }
  std::string read_text() {
    const auto size = get<size_t>();
    TORCH_INTERNAL_ASSERT(size <= text_.size() - at_);
    at_ += size;
    return text_.substr(at_ - size, size);
  }
  at::Tensor read_tensor() {
    const auto dtype = static_cast<at::ScalarType>(get<int8_t>());
    std::vector<int64_t> sizes(static_cast<size_t>(get<int64_t>()));
    for (auto& size : sizes) size = get<int64_t>();
    tensors_.push_back(at::empty(sizes, dtype));
    return tensors_.back();
  }
  std::vector<c10::IValue> read_all() {
    std::vector<c10::IValue> values(get<size_t>());
    for (auto& value : values) value = read();
    return values;
  }
  c10::IValue read_dict() {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (auto left = get<size_t>(); left > 0; --left) {
      auto key = read();
      dict.insert(std::move(key), read());
    }
    return dict;
  }

  const std::string& text_;
  std::vector<at::Tensor>& tensors_;
  size_t at_ = 0;
};

}  // namespace

FlatState flatten(const c10::IValue& state) {
  FlatState flat;
  Writer(flat).write(state);
  return flat;
}

c10::IValue unflatten(const std::string& text, std::vector<at::Tensor>& tensors) {
  return Reader(text, tensors).read();
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous().flatten().view(at::kByte);
}

std::string packed_state(const c10::IValue& state) {
  const auto flat = flatten(state);
  std::vector<std::string> texts{flat.text};
  for (const auto& tensor : flat.tensors) {
    const auto bytes = bytes_of(tensor);
    texts.emplace_back(
        reinterpret_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
  }
  return packed(texts);
}

c10::IValue unpacked_state(const std::string& text) {
  const auto texts = unpacked(text);
  std::vector<at::Tensor> tensors;
  auto state = unflatten(texts.at(0), tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& bytes = texts.at(i + 1);
    TORCH_INTERNAL_ASSERT(bytes.size() == tensors[i].nbytes());
    if (!bytes.empty()) std::memcpy(tensors[i].mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return state;
}

c10::IValue copied(const c10::IValue& state) {
  if (state.isInt() || state.isDouble() || state.isString()) return state;
  const auto flat = flatten(state);
  std::vector<at::Tensor> tensors;
  auto copy = unflatten(flat.text, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(flat.tensors[i]);
  return copy;
}

uint64_t hash_of(const c10::IValue& state) {
  const auto flat = flatten(state);
  auto hash = fnv1a(flat.text);
  for (const auto& tensor : flat.tensors) {
    const auto bytes = bytes_of(tensor);
    hash = mixed(hash, hash_of_bytes(bytes.const_data_ptr(), static_cast<size_t>(bytes.numel())));
  }
  return hash;
}

}  // namespace ddp::elastic
