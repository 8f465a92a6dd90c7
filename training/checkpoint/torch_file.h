#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include <ATen/core/ivalue.h>

namespace ddp {

/// Takes the next bytes of a file.
using ByteSink = std::function<void(const void* data, size_t size)>;

/// An empty dictionary whose keys and values may be anything: what Python's dict becomes.
c10::impl::GenericDict make_dict();
/// An empty list of anything: a typed one would be written with its type, which Python's
/// `torch.load(..., weights_only=True)` refuses.
c10::impl::GenericList make_list();

/// A copy of all tensors of `value` in host memory, each with its own elements only: a view does
/// not bring its whole storage. The same tensor in two places stays one; other tensors that share
/// a storage become separate.
///
/// \throws c10::ValueError  a tensor without a dense storage.
c10::IValue copy_to_host(const c10::IValue& value);

/// Writes what Python's `torch.load(..., weights_only=True)` reads: tensors, numbers, strings,
/// None, and lists, tuples and dictionaries of these. Tensors are on the host, as copy_to_host
/// leaves them.
///
/// \throws  what `sink` throws.
void write_torch_file(const c10::IValue& value, const ByteSink& sink);

/// Reads what write_torch_file wrote, or Python's `torch.save` of such values. Tensors come on the
/// host, whatever device they were saved from.
///
/// \throws c10::Error  with the path: not such a file, or one that is damaged.
c10::IValue read_torch_file(const std::string& path);

}  // namespace ddp
