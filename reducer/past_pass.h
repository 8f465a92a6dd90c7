#pragma once

#include <cstdint>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "problem_report.h"
#include "status_board.h"

namespace ddp {

constexpr const char* kExchangingStatus = "exchanging the ranks' status";

/// A reduced pass that the host is through with. A device may still be about it.
struct PastPass {
  int64_t number;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;  // those that the host did not wait for
  StatusBoard::Arrival status;
  std::vector<Problem> problems;  // this rank's
  uint64_t forwards = 0;          // this rank's, for training
};

}  // namespace ddp
