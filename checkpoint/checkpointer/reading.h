#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/internal/checkpoint_part.h>
#include <ddp/internal/module_tensors.h>
#include "checkpointer/sharded_parts.h"

namespace ddp {

struct NamedPart {
  std::string name;
  detail::CheckpointPartPtr part;
  bool is_per_rank = false;
};

/// Returns the layouts of the modules of parts that all ranks share, or of the parts of each rank.
LayoutsByParameter layouts_of_parts(const std::vector<NamedPart>& parts, bool of_per_rank = false);

/// Returns the file of a part that all ranks share: "model.pt".
std::string part_file(const std::string& name);

/// Returns the state that a rank saves for itself: its random numbers and its own parts.
c10::IValue state_of_rank(const std::vector<NamedPart>& parts);

/// The result of reading a checkpoint on one rank.
struct Reading {
  enum class Verdict : char {
    Fits = 'F',
    Damaged = 'D',  // an older one may be whole
    Refused = 'R',  // it is whole, or unreadable, and this program cannot load it
  };
  Verdict verdict = Verdict::Fits;
  std::string text;  // the reason why it does not fit; where it does, a name for its contents
  std::vector<PreparedLoad> loads;
};

/// Reads and checks the files that a rank needs of a checkpoint, and compares them with its parts.
/// Changes nothing, and does not throw.
///
/// \param folder  the checkpoint's; `step` is the step in its name.
Reading read_checkpoint(
    const std::string& folder, int64_t step, const std::vector<NamedPart>& parts,
    const std::vector<ShardedPart>& sharded, int rank, bool strict);

}  // namespace ddp
