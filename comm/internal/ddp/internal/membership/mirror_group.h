#pragma once

#include <chrono>
#include <string>

#include <ddp/process_group.h>

namespace ddp {

/// Makes a group for a process that has not met the other ranks yet: every other rank answers as
/// this one would. So a program can make its model and its wrapper before it joins ranks that
/// train.
///
/// A sum is this rank's value times the size, a broadcast leaves the tensor as it is, gathering
/// gives `size` copies. A rank of it has no peer to send to: send, recv and scatter throw, and so
/// does making further groups of it. Of CPU tensors.
ProcessGroup make_mirror_group(int rank, int size, std::chrono::milliseconds timeout);

/// Ends it: later calls throw RankLost.
void end_mirror_group(const ProcessGroup& group);

}  // namespace ddp
