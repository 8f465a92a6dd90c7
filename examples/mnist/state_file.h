#pragma once

#include <string>

#include "net.h"

namespace mnist {

/// Saves the parameters of `net` under Python's names: "conv1.weight", "conv1.bias", ...
///
/// The file appears whole or not at all: it is written beside `path` and renamed. It is read with
/// `torch::load(net, path)`, or in Python with `torch.jit.load(path).state_dict()`.
///
/// \throws c10::Error  when it cannot be written; no part of the file is left then.
void save(const Net& net, const std::string& path);

}  // namespace mnist
