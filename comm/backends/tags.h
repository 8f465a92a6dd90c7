// Tags of point-to-point messages.
#pragma once

namespace ddp {

/// The largest tag of a user's message. The library reserves larger ones.
constexpr int kMostTag = (1 << 30) - 1;

/// The tag of messages that an all-to-all is made of, to which their dtype is added.
constexpr int kAllToAllTag = 0x60000000;

constexpr bool is_tag(int tag) { return tag >= 0 && tag <= kMostTag; }

}  // namespace ddp
