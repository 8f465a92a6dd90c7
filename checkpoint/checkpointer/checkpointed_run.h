#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ddp/checkpointer.h>

#include "checkpointer/peers.h"
#include "checkpointer/reading.h"
#include "checkpointer/sharded_parts.h"
#include "files/folder.h"

namespace ddp {

/// The objects that a Checkpointer saves and loads, their folder, and the ranks.
struct CheckpointedRun {
  CheckpointedRun(std::string path, const CheckpointerOptions& given)
      : options(CheckpointerOptions(given).process_group(GroupArg())),
        group(given.process_group().get()),
        folder(std::move(path)),
        peers(group) {}

  void rebind(const ProcessGroup& other) {
    group = other;
    peers = CheckpointPeers(group);
    sharded.forget_exchange();
  }

  const CheckpointerOptions options;  // without the group, which rebind() changes
  ProcessGroup group;
  CheckpointFolder folder;
  CheckpointPeers peers;
  std::vector<NamedPart> parts;
  ShardedParts sharded;
  std::vector<NamedPart> cut_models = {};  // added as parts; now sharded
};

}  // namespace ddp
