#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include <ddp/internal/group_monitor.h>

#include "wrapper/module_state.h"

namespace ddp {

/// Warns of parameters that were registered after the module was wrapped.
class ParameterWatch {
 public:
  /// Remembers the parameters that `root` has now. `root` outlives this.
  ParameterWatch(const torch::nn::Module& root, const Names& ignored);

  /// Warns of the parameters that require a gradient and were registered since, without the ignored
  /// ones, of each once.
  ///
  /// Cost: a walk over all modules, about 0.1 us each; more only where something has changed.
  void warn_of_new(const GroupMonitor& monitor);

 private:
  std::vector<std::string> find_new();

  const torch::nn::Module& root_;
  const Names ignored_;
  std::vector<const void*> tensors_;  // TensorImpls, in the order of a walk over the modules
  Names known_;
};

}  // namespace ddp
