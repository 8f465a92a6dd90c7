#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// A handle that is complete when several others are.
class WorkParts {
 public:
  virtual ~WorkParts() = default;
  virtual const std::vector<c10::intrusive_ptr<c10d::Work>>& parts() const = 0;
};

}  // namespace ddp
