#include "sharded/passes/failed_passes.h"

#include <string>
#include <utility>

#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "sharded/passes/unit_nodes.h"
#include "sharded/sharded_model.h"

namespace ddp {
namespace {

void tell_models(const torch::autograd::edge_list& roots, const std::exception_ptr& cause) {
  for (const auto& pass : passes_of(roots)) {
    if (pass->model) pass->model->backward_failed(cause);
  }
}

}  // namespace

FailedPasses::FailedPasses(const ProcessGroup& group)
    : monitor_(monitor_of(group)),
      forwards_(
          monitor_, {"began a forward pass of a sharded model that",
                     "Forward of a sharded model is collective, in evaluation, too: run it on "
                     "every rank, equally often, ddp::equal_batches()"}) {
  set_backward_failed(&tell_models);
}

void FailedPasses::begin() {
  forwards_.await_failures();
  forwards_.restart();
  is_noted_ = false;
}

void FailedPasses::note(const char* doing, const std::exception_ptr& cause) noexcept {
  try {
    if (std::exchange(is_noted_, true) || monitor_->aborted()) return;
    forwards_.fail(ddp::str(
        doing, " of a sharded model threw on ", monitor_->rank_text(), ": ", text_of(cause)));
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

}  // namespace ddp
