#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// Sets `key` to `text` if its value is `expected` ("": unset, or ""). For a store of any class.
///
/// \return its value after that.
std::string compare_set(
    c10d::Store& store, const std::string& key, const std::string& expected,
    const std::string& text);

}  // namespace ddp
