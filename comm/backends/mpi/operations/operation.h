#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backends/mpi/mpi_calls.h"

namespace ddp::backends::mpi {

class Channel;
class MpiWork;

/// A collective or a message that the MPI thread carries out.
class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Operation() = default;

  /// Posts messages and tests those under way. The first call begins.
  ///
  /// \return  whether the operation is over.
  /// \throws  if it has failed, with its group.
  virtual bool advance() = 0;

  /// Whether the last advance() has found something done.
  bool has_moved() const { return has_moved_; }

  std::shared_ptr<Channel> channel;
  c10::intrusive_ptr<MpiWork> work;
  Clock::time_point deadline;
  std::string title;               // for the message about a timeout
  std::optional<uint64_t> number;  // of a collective, in its group

 protected:
  bool has_moved_ = false;
};

using OperationPtr = std::unique_ptr<Operation>;

}  // namespace ddp::backends::mpi
