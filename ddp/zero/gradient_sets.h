#pragma once

#include <vector>

#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

#include "zero/gradient_norm.h"

namespace ddp {

/// Collects gradients by the groups over which they are cut.
class GradientSets {
 public:
  /// Adds a set, if an empty one, for the groups: ranks without a gradient take part, too. So every
  /// rank has the sets in the same order.
  ///
  /// \param gradient  of the layout's parameter, or this rank's part of it; may be undefined.
  /// \throws c10::ValueError  if that is a part of a sum.
  void add(
      const ParameterLayout& layout, const std::vector<ProcessGroup>& groups,
      const at::Tensor& gradient);

  const std::vector<ShardedGradients>& sets() const { return sets_; }

 private:
  std::vector<ShardedGradients> sets_;
};

}  // namespace ddp
