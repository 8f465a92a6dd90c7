#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/stage_tensors.h>
#include <ddp/pipeline.h>

#include "pipeline/schedule.h"

namespace ddp {

/// Parameters of a rank that other stages have, too.
class TiedParameters {
 public:
  TiedParameters() = default;
  /// \param rank  of the pipeline.
  /// \throws c10::ValueError  for one that no chunk has, or without a group.
  TiedParameters(
      std::vector<TiedParameter> tied, const std::vector<detail::StageModule>& chunks,
      const PipelineShape& shape, int64_t rank);

  /// The description of them for the other ranks.
  const std::string& text() const { return text_; }

  /// Gives all copies the values of the first, and tells `places` of them.
  ///
  /// \param by_rank  the ranks' texts, without a problem.
  ///
  /// Collective: over the groups.
  void begin(
      const std::vector<std::string>& by_rank, const ProcessGroup& ranks, StageTensors& places);

  std::vector<at::Tensor> parameters() const;
  /// Adds up the copies' gradients of a step.
  ///
  /// Collective: over the groups.
  void sum_gradients(GroupMonitor& monitor) const;

 private:
  std::vector<TiedParameter> tied_;
  std::string text_;
};

/// Why the ranks' texts do not fit together; "" if they do. A pure function, the same on all ranks.
std::string problem_of_tied(const std::vector<std::string>& by_rank);

}  // namespace ddp
