#pragma once

#include <string>

#include "net.h"

namespace mnist {

/// \throws c10::ValueError  when no file can be made at `path`: its folder is missing, or it is a
///         folder itself. For a check before hours of training.
///
/// \param option  that asked for it, for the error text: "--save".
void check_can_write(const std::string& option, const std::string& path);

/// Saves the parameters of `net` under Python's names: "conv1.weight", "conv1.bias", ...
///
/// The file appears whole or not at all: it is written beside `path` and renamed. It is read with
/// `torch::load(net, path)`, or in Python with `torch.jit.load(path).state_dict()`.
///
/// \throws c10::Error  when it cannot be written; nothing is left behind then.
void save(const Net& net, const std::string& path);

}  // namespace mnist
