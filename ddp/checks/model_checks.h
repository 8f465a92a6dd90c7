#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/reducer.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

#include "wrapper/model_tensors.h"

namespace ddp {

/// A module of the library's own that has rules for what it holds. A rule that is broken on one
/// rank is an error of all.
class ModuleWithRules {
 public:
  /// \throws c10::ValueError  where one is broken.
  virtual void check() const = 0;

 protected:
  ModuleWithRules() = default;
  ModuleWithRules(const ModuleWithRules&) = default;
  ModuleWithRules& operator=(const ModuleWithRules&) = default;
  virtual ~ModuleWithRules() = default;
};

// Rules for models that may be wrapped. Each function throws c10::ValueError where its rule does
// not hold.

/// The names are those of parameters or buffers of the module.
void check_names_to_ignore(const torch::nn::Module& module, const std::vector<std::string>& names);

/// The parameters, at least one, are on one type of device, and the group has a backend for it.
void check_devices(const std::vector<NamedParameter>& parameters, const ProcessGroup& group);

/// Each tensor has a dense storage of plain numbers: rank 0's values are sent as raw bytes.
void check_layouts(const std::vector<StateTensor>& state);

/// The ranks of the group have the same elements of the module's parameters.
///
/// \param ignored  names of parameters that may differ.
void check_not_cut(
    const torch::nn::Module& module, const std::vector<std::string>& ignored,
    const c10d::ProcessGroup& group);

/// The tensors of also_average() are leaves that require a gradient, each once, and no parameters
/// of the module.
void check_outside(const std::vector<at::Tensor>& tensors, const torch::nn::Module& module);

/// There is at most one device, an accelerator that has all parameters.
///
/// \return that device.
std::optional<c10::Device> checked_input_device(
    const std::vector<c10::Device>& device_ids, const std::vector<NamedParameter>& parameters);

}  // namespace ddp
