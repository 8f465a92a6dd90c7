#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>

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

  /// The state now. Its tensors may be the live ones.
  virtual c10::IValue state() = 0;

  /// Checks whether a state fits, and changes nothing yet.
  ///
  /// \throws c10::Error  it does not.
  virtual PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) = 0;
};

}  // namespace ddp::detail
