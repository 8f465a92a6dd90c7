// Where a rank waits that sends or receives a message: there no other rank waits.
#pragma once

#include <string>

namespace ddp {

/// "send to rank 1 with tag 0".
std::string message_place(bool sends, int peer, int tag);

bool is_message_place(const std::string& where);

/// The remedy for a rank that waits in `where` and others as `others` says: "" if none is known.
std::string advice_for_message(const std::string& where, const std::string& others);

}  // namespace ddp
