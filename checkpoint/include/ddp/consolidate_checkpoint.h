#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <ddp/export.h>
#include <torch/arg.h>

namespace ddp {

/// Options of consolidate_checkpoint().
struct ConsolidateOptions {
  /// The name that the part was added under.
  TORCH_ARG(std::string, part) = "model";
  /// Called with a line on each file that is checked, each tensor that is written and each step
  /// that is left out.
  TORCH_ARG(std::function<void(const std::string& line)>, progress) = {};
};

/// Writes one file of a part that a Checkpointer has saved, however many ranks the part was cut
/// over. No ranks are needed. The program ddp_consolidate does the same.
///
/// \param folder  the Checkpointer's.
/// \param step  of the checkpoint; std::nullopt: the newest in which the part is whole.
/// \param file  torch.load(file, weights_only=True) reads it: of a model its state_dict(), of an
///        Adam, AdamW, SGD, RMSprop or Adagrad Python's optimizer.state_dict(). Of a model it may
///        end with ".safetensors", and is such a file then. It appears whole or not at all.
/// \return the checkpoint's step.
/// \throws c10::Error  there is no such step or part; a file is missing, cut off or damaged (the
/// text
///         names it); `file` cannot be written.
///
/// Collective: no. Cost: reads the part's files twice, once for the checksums. Memory: of one
/// tensor.
DDP_API int64_t consolidate_checkpoint(
    const std::string& folder, std::optional<int64_t> step, const std::string& file,
    const ConsolidateOptions& options = {});

}  // namespace ddp
