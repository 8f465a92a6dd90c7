#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "wrapper/module_state.h"

namespace ddp {

/// Finds parameters that were registered after the module was wrapped.
class ParameterWatch {
 public:
  /// Remembers the parameters that `root` has now. `root` outlives this.
  ParameterWatch(const torch::nn::Module& root, const Names& ignored);

  /// The names of parameters that require a gradient and were registered since, without the ignored
  /// ones. Returns each name once.
  ///
  /// Cost: a walk over all modules, about 0.1 us each; more only where something has changed.
  std::vector<std::string> find_new();

 private:
  const torch::nn::Module& root_;
  const Names ignored_;
  std::vector<const void*> tensors_;  // TensorImpls, in the order of a walk over the modules
  Names known_;
};

}  // namespace ddp
