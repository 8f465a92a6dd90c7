#include <ddp/internal/autograd_engine.h>

#include <atomic>
#include <utility>

#include <torch/csrc/autograd/engine.h>

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

}  // namespace

bool set_saved_hooks(MakeSavedHooks make) {
  make_saved_hooks = make;
  return install_engine();
}

bool set_backward_failed(BackwardFailed failed) {
  backward_failed = failed;
  return install_engine();
}

}  // namespace ddp
