#include "autograd/early_failures.h"

#include <mutex>
#include <unordered_set>
#include <utility>

#include <ATen/record_function.h>
#include <ddp/internal/autograd_engine.h>
#include <ddp/internal/autograd_node.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {

struct ExpectedPass {
  EarlyFailures::IsExpected is_expected;
  EarlyFailures::OnFailure on_failure;  // empty once its owner is gone
  std::vector<WeakNodePtr> outputs = {};
};

namespace {

using ExpectedPassPtr = std::shared_ptr<ExpectedPass>;

/// The passes that all reducers of the process expect.
class ExpectedPasses {
 public:
  void add(const ExpectedPassPtr& pass, const std::vector<at::Tensor>& outputs) {
    const std::lock_guard lock(mutex_);
    for (const auto& output : outputs) {
      if (output.defined() && output.grad_fn()) {
        pass->outputs.push_back(WeakNodePtr(output.grad_fn()));
      }
    }
    if (!contains(passes_, pass)) passes_.push_back(pass);
    drop_dead();
  }

  void remove(const ExpectedPassPtr& pass) {
    const std::lock_guard lock(mutex_);
    pass->outputs.clear();
    drop_dead();
  }

  // Called within a backward pass.
  void see(const std::unordered_set<torch::autograd::Node*>& nodes) {
    // Asked for each operation of a pass, of which one answer is enough.
    thread_local int known = -1;
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(known, task) == task) return;
    std::vector<ExpectedPassPtr> seen;
    std::vector<NodePtr>
        alive;  // until the lock is given back: the last reference runs destructors
    {
      const std::lock_guard lock(mutex_);
      drop_dead();
      const auto is_in = [&](const WeakNodePtr& node) {
        alive.push_back(node.lock());
        return nodes.count(alive.back().get()) > 0;
      };
      for (const auto& pass : passes_) {
        if (any_of(pass->outputs, is_in)) seen.push_back(pass);
      }
    }
    for (const auto& pass : seen) {
      if (!pass->is_expected()) continue;
      remove(pass);
      at_backward_end(
          [] {},
          [pass](const std::exception_ptr& cause) {
            if (pass->on_failure) pass->on_failure(cause);
          });
    }
  }

 private:
  // Each operation costs a little while the callback is enabled.
  void drop_dead() {
    const auto is_dead = [](const ExpectedPassPtr& pass) {
      auto& outputs = pass->outputs;
      drop_if(outputs, [](const WeakNodePtr& node) { return node.expired(); });
      return outputs.empty();
    };
    drop_if(passes_, is_dead);
    const bool enables = !passes_.empty();
    if (std::exchange(is_enabled_, enables) == enables) return;
    if (callback_ == at::INVALID_CALLBACK_HANDLE) {
      // Autograd records the evaluation of each node, its hooks included, as a function.
      callback_ = at::addGlobalCallback(
          at::RecordFunctionCallback(on_function).scopes({at::RecordScope::FUNCTION}));
    } else {
      enables ? at::reenableCallback(callback_) : at::disableCallback(callback_);
    }
  }

  static std::unique_ptr<at::ObserverContext> on_function(const at::RecordFunction& function);

  std::mutex mutex_;
  std::vector<ExpectedPassPtr> passes_;
  bool is_enabled_ = false;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

// Never destroyed: a reducer may be destroyed at the end of the process.
ExpectedPasses& expected_passes() {
  static auto* passes = new ExpectedPasses;
  return *passes;
}

std::unique_ptr<at::ObserverContext> ExpectedPasses::on_function(const at::RecordFunction&) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes) expected_passes().see(*nodes);
  return nullptr;
}

}  // namespace

EarlyFailures::EarlyFailures(IsExpected is_expected, OnFailure on_failure)
    : pass_(std::make_shared<ExpectedPass>(
          ExpectedPass{std::move(is_expected), std::move(on_failure)})) {}

EarlyFailures::~EarlyFailures() {
  expected_passes().remove(pass_);
  pass_->on_failure = nullptr;
}

void EarlyFailures::expect(const std::vector<at::Tensor>& outputs) {
  expected_passes().add(pass_, outputs);
}

void EarlyFailures::reached() { expected_passes().remove(pass_); }

}  // namespace ddp
