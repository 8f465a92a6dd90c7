#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include <ATen/core/ivalue.h>

namespace ddp {

class LazyTensors;

/// Takes the next bytes of a file.
using ByteSink = std::function<void(const void* data, size_t size)>;

/// Makes an empty dictionary with keys and values of any type, as Python's dict is read.
c10::impl::GenericDict make_dict();
/// Makes an empty list of any type: a typed one would be written with its type, which Python's
/// `torch.load(..., weights_only=True)` rejects.
c10::impl::GenericList make_list();

/// Copies all tensors of `value` to host memory, each with its own elements only: a view does not
/// bring its whole storage. A tensor that occurs twice stays one; different tensors that share a
/// storage become separate.
///
/// \throws c10::ValueError  a tensor without a dense storage.
c10::IValue copy_to_host(const c10::IValue& value);

/// Writes a file that Python's `torch.load(..., weights_only=True)` reads: tensors, numbers,
/// strings, None, and lists, tuples and dictionaries of these. Tensors must be on the host, as
/// after copy_to_host.
///
/// \param lazy  whose tensors `value` may have; null: none.
/// \throws  the exceptions of `sink`, and of the functions of `lazy`.
void write_torch_file(
    const c10::IValue& value, const ByteSink& sink, const LazyTensors* lazy = nullptr);

/// Reads a file of write_torch_file, or of Python's `torch.save` for such values. Tensors are on
/// the host, whatever device they were saved from.
///
/// \throws c10::Error  with the path: it is no such file, or is damaged.
c10::IValue read_torch_file(const std::string& path);

}  // namespace ddp
