#pragma once

#include <functional>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

namespace ddp {

/// Returns the bytes that a pickle refers to by a key.
using FindStorage = std::function<c10::Storage(const std::string& key)>;

/// Reads the pickle of a `torch.save`: tensors and parameters, numbers, strings, None, and lists,
/// tuples, dictionaries and OrderedDicts of these. Calls no code that the pickle names.
///
/// LibTorch's own reader rejects the `state_dict()` of a Python module, which is an OrderedDict
/// with an attribute (`_metadata`). This reader leaves that attribute out.
///
/// \throws c10::Error  the pickle holds anything else, or is damaged.
c10::IValue read_pickle(const std::string& pickle, const FindStorage& find_storage);

}  // namespace ddp
