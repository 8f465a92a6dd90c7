// Tags of point-to-point messages.
#pragma once

namespace ddp {

/// The largest tag of a user's message. The library reserves larger ones.
constexpr int kMostTag = (1 << 30) - 1;

constexpr bool is_tag(int tag) { return tag >= 0 && tag <= kMostTag; }

}  // namespace ddp
