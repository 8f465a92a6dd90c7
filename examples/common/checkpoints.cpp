#include "checkpoints.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "on_all_ranks.h"

namespace examples {

int64_t begin_run(
    std::optional<ddp::Checkpointer>& checkpointer, const std::string& folder, bool resume,
    Progress& progress, const char* unit) {
  if (!checkpointer) return 0;
  on_all_ranks([&] {
    TORCH_CHECK_VALUE(
        resume || checkpointer->steps().empty(), "--checkpoint ", folder,
        ": expected a folder without checkpoints, got some of another run. Add --resume to go on "
        "with it, or name another folder.");
  });
  if (!resume) return 0;
  const auto step = checkpointer->load_latest();
  progress.line(
      step ? c10::str("resumed after ", unit, " ", *step)
           : "no checkpoint in " + folder + " yet: starts from the beginning");
  return step.value_or(0);
}

}  // namespace examples
