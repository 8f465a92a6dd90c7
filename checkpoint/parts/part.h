#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/process_group.h>

#include <ddp/internal/prepared_load.h>

namespace ddp::detail {

/// How a state is to be loaded.
struct LoadContext {
  bool strict = true;
  std::string subject;  // the file; the texts of errors begin with it
};

/// A named part of a checkpoint, whose state is saved and loaded.
class CheckpointPart {
 public:
  CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  virtual ~CheckpointPart() = default;

  /// Fetches from the other ranks what state() returns next. Called on every rank of a shared part,
  /// before state() is called on rank 0.
  ///
  /// Collective: over `group`, where it does anything.
  virtual void gather(const ProcessGroup& /*group*/) {}

  /// Returns the present state. Its tensors may be the live ones.
  virtual c10::IValue state() = 0;

  /// Checks whether a state fits; changes nothing yet.
  ///
  /// \throws c10::Error  it does not.
  virtual PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) = 0;
};

}  // namespace ddp::detail
