#pragma once

#include <functional>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// Returns the archive that `save` writes as a dictionary with one tensor of bytes ("archive").
c10::IValue archive_bytes(const std::function<void(torch::serialize::OutputArchive&)>& save);

/// Whether a value comes from archive_bytes().
bool is_archive_bytes(const c10::IValue& value);

/// Lets `load` read it. The tensors are on the devices that they were saved from.
///
/// \throws c10::Error  the error of `load`, with the subject before it.
void read_archive_bytes(
    const c10::IValue& value, const std::string& subject,
    const std::function<void(torch::serialize::InputArchive&)>& load);

}  // namespace ddp
