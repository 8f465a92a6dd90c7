#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <ddp/internal/tensors_on_host.h>
#include "shards/layout.h"

namespace ddp {

/// Takes the next bytes of a file.
using ByteSink = std::function<void(const void* data, size_t size)>;

/// Makes a dictionary with keys and values of any type, as Python's dict is read.
c10::impl::GenericDict make_dict(
    std::initializer_list<std::pair<c10::IValue, c10::IValue>> entries = {});
/// Makes an empty list of any type: a typed one would be written with its type, which Python's
/// `torch.load(..., weights_only=True)` rejects.
c10::impl::GenericList make_list();

/// Copies all tensors of `value` to host memory, each with its own elements only: a view does not
/// bring its whole storage. A tensor that occurs twice stays one; different tensors that share a
/// storage become separate.
///
/// \throws c10::ValueError  a tensor without a dense storage.
c10::IValue copy_to_host(const c10::IValue& value);
/// The same; the tensors have their elements once `copies.wait()` has returned.
c10::IValue copy_to_host(const c10::IValue& value, TensorsOnHost& copies);

/// Placeholders without memory. The tensors in their places are read while a file is written, so
/// that one tensor at a time needs memory.
class LazyTensors {
 public:
  using Read = std::function<at::Tensor()>;

  /// \param read  returns the elements, on the host, row by row; called once.
  /// \return a tensor to put into a dictionary, under several keys if they share it.
  at::Tensor add(const TensorKind& kind, Read read);

  /// Returns the elements of a tensor of add(); an undefined tensor for any other.
  at::Tensor read(const at::Tensor& placeholder) const;

 private:
  std::unordered_map<const void*, Read> reads_;  // by StorageImpl
};

/// Writes a file that Python's `torch.load(..., weights_only=True)` reads: tensors, numbers,
/// strings, None, and lists, tuples and dictionaries of these. Tensors must be on the host, as
/// after copy_to_host.
///
/// \param lazy  whose tensors `value` may have; null: none.
/// \throws  the exceptions of `sink`, and of the functions of `lazy`.
void write_torch_file(
    const c10::IValue& value, const ByteSink& sink, const LazyTensors* lazy = nullptr);

/// The same for a file that appears whole or not at all. Calls `value` once the file is open, so
/// that a path where nothing can be written is found before a model is copied.
///
/// \throws c10::Error  too, with the path.
void replace_torch_file(
    const std::string& path, const std::function<c10::IValue()>& value,
    const LazyTensors* lazy = nullptr);

/// Reads a file of write_torch_file, or of Python's `torch.save` for such values. Tensors are on
/// the host, whatever device they were saved from.
///
/// \throws c10::Error  with the path: it is no such file, or is damaged.
c10::IValue read_torch_file(const std::string& path);

}  // namespace ddp
