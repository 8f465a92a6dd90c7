#include "saved_tensors/saved_tensor_hooks.h"

#include <memory>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace ddp {
namespace {

using Packs = std::vector<std::shared_ptr<const PackFunction>>;

/// The innermost last; null where none is to be called.
Packs& packs_of_this_thread() {
  static thread_local Packs packs;
  return packs;
}

class PackedVariable final : public torch::autograd::SavedVariableHooks {
 public:
  explicit PackedVariable(std::shared_ptr<const PackFunction> pack) : pack_(std::move(pack)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const c10::NoGradGuard no_grad;
    const WithoutSavedTensorHooks no_hooks;
    unpack_ = (*pack_)(tensor);
    pack_.reset();
  }
  at::Tensor call_unpack_hook() override {
    const c10::NoGradGuard no_grad;
    const WithoutSavedTensorHooks no_hooks;
    return unpack_();
  }

 private:
  std::shared_ptr<const PackFunction> pack_;
  UnpackFunction unpack_;
};

/// LibTorch asks the default engine for hooks whenever it saves a tensor, and this is its only way
/// for hooks that belong to no node. Backward passes run in LibTorch's own engine: a process starts
/// the threads of its devices once, for one engine.
class EngineWithHooks final : public torch::autograd::Engine {
  using Tensors = torch::autograd::variable_list;
  using Edges = torch::autograd::edge_list;

 public:
  static torch::autograd::Engine& get() {
    static auto* const engine = new EngineWithHooks;  // threads of it may outlive main()
    return *engine;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& packs = packs_of_this_thread();
    if (packs.empty() || packs.back() == nullptr) return nullptr;
    return std::make_unique<PackedVariable>(packs.back());
  }
  Tensors execute(
      const Edges& roots, const Tensors& inputs, bool keep_graph, bool create_graph,
      bool accumulate_grad, const Edges& outputs) override {
    return get_base_engine().execute(
        roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
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

void install_engine() {
  using torch::autograd::Engine;
  // An error leaves this undone, so that the next one throws as well.
  static const bool installed = [] {
    DDP_CHECK(
        &Engine::get_default_engine() == &Engine::get_base_engine(),
        "save_on_host: expected LibTorch's own autograd engine, got another library's: Python is "
        "in this process. Use torch.autograd.graph.save_on_cpu there.");
    torch::autograd::set_default_engine_stub(&EngineWithHooks::get);
    return true;
  }();
  (void)installed;
}

}  // namespace

SavedTensorHooks::SavedTensorHooks(PackFunction pack) {
  install_engine();
  packs_of_this_thread().push_back(std::make_shared<const PackFunction>(std::move(pack)));
}

SavedTensorHooks::~SavedTensorHooks() { packs_of_this_thread().pop_back(); }

WithoutSavedTensorHooks::WithoutSavedTensorHooks() { packs_of_this_thread().push_back(nullptr); }

WithoutSavedTensorHooks::~WithoutSavedTensorHooks() { packs_of_this_thread().pop_back(); }

UnpackFunction keep_as_it_is(const at::Tensor& tensor) {
  return [tensor = tensor.detach(), version = tensor._version()] {
    DDP_CHECK(
        tensor._version() == version,
        "save_on_host: expected a tensor as it was when an operation saved it, got [",
        joined_by(", ", tensor.sizes()),
        "] that has been modified by an inplace operation since. Pass a clone() to one of them.");
    return tensor;
  };
}

}  // namespace ddp
