#include <ddp/internal/autograd_engine.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {
namespace {

using torch::autograd::Engine;

std::atomic<MakeSavedHooks> make_saved_hooks{nullptr};
std::atomic<BackwardFailed> backward_failed{nullptr};

/// LibTorch asks the default engine for hooks whenever it saves a tensor, and this is its only way
/// for hooks that belong to no node; and no other place sees every backward pass that throws.
/// Backward passes run in LibTorch's own engine: a process starts the threads of its devices once,
/// for one engine.
class EngineWithHooks final : public Engine {
  using Tensors = torch::autograd::variable_list;
  using Edges = torch::autograd::edge_list;

 public:
  static Engine& get() {
    static auto* const engine = new EngineWithHooks;  // threads of it may outlive main()
    return *engine;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto make = make_saved_hooks.load();
    return make ? make() : nullptr;
  }
  Tensors execute(
      const Edges& roots, const Tensors& inputs, bool keep_graph, bool create_graph,
      bool accumulate_grad, const Edges& outputs) override {
    try {
      return get_base_engine().execute(
          roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    } catch (...) {
      if (const auto failed = backward_failed.load()) failed(roots, std::current_exception());
      throw;
    }
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& inputs) override {
    return get_base_engine().execute_with_graph_task(
        graph_task, std::move(graph_root), std::move(inputs));
  }

 private:
  EngineWithHooks() = default;
};

bool install_engine() {
  static const bool is_installed = [] {
    if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
    torch::autograd::set_default_engine_stub(&EngineWithHooks::get);
    return true;
  }();
  return is_installed;
}

// The future in which autograd stores the result, or the exception, of the backward pass that the
// calling thread runs; empty outside of a backward pass.
//
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

/// Owned by a final callback of a backward pass. Autograd destroys the callbacks of a pass that
/// throws without calling them.
class EndWatcher {
 public:
  explicit EndWatcher(std::function<void(const std::exception_ptr&)> failed)
      : failed_(std::move(failed)), result_(current_backward_result()) {}
  ~EndWatcher() {
    if (!failed_) return;
    const bool is_known = result_ && result_->hasError();
    failed_(is_known ? result_->exception_ptr() : nullptr);
  }
  C10_DISABLE_COPY_AND_ASSIGN(EndWatcher);

  void complete() { failed_ = nullptr; }

 private:
  std::function<void(const std::exception_ptr&)> failed_;  // empty once the pass has ended
  const c10::intrusive_ptr<c10::ivalue::Future> result_;
};

}  // namespace

void at_backward_end(
    std::function<void()> done, std::function<void(const std::exception_ptr& cause)> failed) {
  Engine::get_default_engine().queue_callback(
      [done = std::move(done), watcher = std::make_shared<EndWatcher>(std::move(failed))] {
        watcher->complete();
        done();
      });
}

bool set_saved_hooks(MakeSavedHooks make) {
  make_saved_hooks = make;
  return install_engine();
}

bool set_backward_failed(BackwardFailed failed) {
  backward_failed = failed;
  return install_engine();
}

}  // namespace ddp
