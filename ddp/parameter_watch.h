#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "module_state.h"

namespace ddp {

/// Notices that a module has parameters which it did not have.
class ParameterWatch {
 public:
  /// What `root` has now is known. `root` outlives this.
  ParameterWatch(const torch::nn::Module& root, const Names& ignored);

  /// Names of parameters that require a gradient and were registered since, but for the ignored
  /// ones; each once.
  ///
  /// Cost: a walk over all modules, about 0.1 us each; more only where something has changed.
  std::vector<std::string> find_new();

 private:
  const torch::nn::Module& root_;
  const Names ignored_;
  std::vector<const void*> tensors_;  // as a walk meets them
  Names known_;
};

}  // namespace ddp
