// Calls and groups in the words of the library's errors.
#pragma once

#include <cstdint>
#include <string>

#include "launch/pretend/call_list.h"

namespace ddp::launch {

/// `process group "mesh_0" (dp, ranks 0-7)`.
std::string group_text(
    const std::string& name, const std::string& axis, const std::vector<int>& ranks);

/// "broadcast of 4096 bytes of float from rank 3 (parameters of DistributedDataParallel, step 2)".
std::string call_text(const CallList& list, const ListedCall& call);

/// Whether all ranks have to name the same root.
bool has_root(const std::string& kind);

/// Whether all ranks give equally many bytes.
bool has_equal_bytes(const std::string& kind);

}  // namespace ddp::launch
