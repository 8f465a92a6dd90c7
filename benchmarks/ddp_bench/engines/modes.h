#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>

#include "engine.h"

namespace ddp_bench {

/// A way to train, with its name on the command line.
struct Mode {
  std::string name;
  std::string help;
  bool communicates = true;
  bool has_buckets = false;  // whose size the command line may set
  int fewest_warmup = 3;     // static_graph counts in the first step, rebuilds before the third
};

/// The mode that sends nothing: its time is the others' compute_ms.
inline constexpr const char* kNone = "none";

const std::vector<Mode>& modes();

/// \throws c10::ValueError  for a name that no mode has.
const Mode& find_mode(const std::string& name);

/// The options for a wrapper with the mode's own: "ddp_view" adds gradient_as_bucket_view, ...
ddp::DistributedDataParallelOptions options_of_mode(
    const std::string& mode, ddp::DistributedDataParallelOptions options);

/// \param options  with a process group; the mode's own are added.
///
/// Collective: yes.
std::unique_ptr<Engine> make_engine(
    const std::string& mode, Task task, const ddp::DistributedDataParallelOptions& options);

}  // namespace ddp_bench
