#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/process_group.h>

#include "prepared_load.h"

namespace ddp::detail {

/// How a state is to be taken over.
struct LoadContext {
  bool strict = true;
  std::string subject;  // that the texts of errors begin with: the file
};

/// Something whose state a checkpoint holds.
class CheckpointPart {
 public:
  CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  virtual ~CheckpointPart() = default;

  /// Fetches from the other ranks what state() returns next, on every rank of a part that they
  /// share, before rank 0 is asked for it.
  ///
  /// Collective: over `group`, where it does anything.
  virtual void gather(const ProcessGroup& /*group*/) {}

  /// The state now. Its tensors may be the live ones.
  virtual c10::IValue state() = 0;

  /// Checks whether a state fits, and changes nothing yet.
  ///
  /// \throws c10::Error  it does not.
  virtual PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) = 0;
};

}  // namespace ddp::detail
