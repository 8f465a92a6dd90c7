#pragma once

#include <c10/util/Exception.h>
#include <ddp/export.h>

namespace ddp {

/// Why a generation of an elastic job (elastic.h) ended on this rank: thrown by calls that wait for
/// its other ranks.
///
/// Another rank was lost, or ranks join or leave. Elastic::loop() repeats the step with the ranks
/// of the next generation; recover() does so for a program that catches this.
class DDP_API RankLost : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

/// The others went on without this rank: it was stopped or cut off for too long. It changes nothing
/// of theirs any more, and has to end; a fresh process takes its place.
class DDP_API Fenced : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

/// The job cannot go on: too few ranks for too long, a coordinator that cannot be reached, or a
/// step that no attempt gets through. The text has the first cause.
class DDP_API QuorumLost : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

}  // namespace ddp
