#include "pass/backward_result.h"

#include <cstddef>

#include <torch/csrc/autograd/graph_task.h>

namespace ddp {

// Autograd gives no hook the exception that ended a backward pass: it drops the callbacks, and
// throws to the caller of backward(). It does not expose the running task either, but a pointer to
// a member of it: the task is the object around that member.
c10::intrusive_ptr<c10::ivalue::Future> current_backward_result() {
  using torch::autograd::GraphTask;
  const auto* member = torch::autograd::get_current_graph_task_exec_info();
  if (!member) return {};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // the task has no virtual base: it is valid
  constexpr auto offset = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  return reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(member) - offset)
      ->future_result_;
}

}  // namespace ddp
