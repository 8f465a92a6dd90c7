#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ddp/fully_sharded.h>
#include <ddp/parameter_layout.h>

namespace ddp {

/// The tensors of a module that becomes a unit.
struct SharedParameters {
  std::vector<ParameterLayout> own;                              ///< of the unit
  std::vector<std::pair<std::string, FullyShardedBase*>> units;  ///< inside, by their paths
};

/// \throws c10::ValueError  for parameters that cannot be cut.
SharedParameters find_parameters(torch::nn::Module& module, const FullyShardedOptions& options);

/// Registers the parameters, buffers and modules that `module` has in `other`, by the same names.
void register_parts_of(torch::nn::Module& module, torch::nn::Module& other);

/// The ranks that a unit is cut over, and, if there are some, those with the same shards.
std::vector<ProcessGroup> all_groups(const FullyShardedOptions& options);

/// Throws on every rank if a rank has a problem, or other parameters than the others, or gathers
/// them in another form.
///
/// Collective: yes. Blocks: host.
void agree_on_parameters(
    const std::vector<ParameterLayout>& own, const std::string& problem, const ProcessGroup& group,
    const MixedPrecisionPolicy& policy);

/// Gives tensors that were made under DeferredInit their values: of the unit alone, so that units
/// have memory one after the other.
void materialize_own(const torch::nn::Module& module, const SharedParameters& found);

/// Gives all ranks rank 0's parameters, and the buffers that no unit inside has.
///
/// Collective: yes. Blocks: host. Memory: none, where tensors are contiguous.
void broadcast_parameters(
    const torch::nn::Module& module, const SharedParameters& found,
    const FullyShardedOptions& options);

}  // namespace ddp
