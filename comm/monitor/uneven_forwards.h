#pragma once

#include <string>

namespace ddp::monitor {

/// Text for ranks with different numbers of forward passes, the likely cause of collectives that do
/// not match. `with` and `without` name ranks.
std::string uneven_forwards_text(const std::string& with, const std::string& without);

}  // namespace ddp::monitor
