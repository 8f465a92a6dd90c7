#include "sharded/error_context.h"

#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

namespace ddp {

void add_context(
    c10::DistBackendError& error, const std::string& doing, const ProcessGroup& group) {
  const std::string text = error.what_without_backtrace();
  const bool ranks_differ = text.find("expected every rank to call the same") != text.npos ||
                            text.find("deadlock: ") != text.npos;
  error.add_context(
      str(doing, " ", on_rank_text(*group), ".",
          ranks_differ ? " All ranks run the same units, in as many batches, in evaluation, too: "
                         "ddp::equal_batches()."
                       : ""));
}

}  // namespace ddp
