// Events of autograd for which it has no hooks.
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace ddp {

/// Makes the hooks of a tensor that an operation saves; null for none.
using MakeSavedHooks = std::unique_ptr<torch::autograd::SavedVariableHooks> (*)();

/// Has autograd call `make` for each tensor that an operation saves.
///
/// \return  false where another library's engine, Python's, is in this process.
bool set_saved_hooks(MakeSavedHooks make);

/// Called on the thread that called backward(), when it threw.
///
/// \param roots  as of torch::autograd::Engine::execute().
using BackwardFailed =
    void (*)(const torch::autograd::edge_list& roots, const std::exception_ptr& cause);

/// Has autograd call `failed` for each backward pass that throws, also where it came to no node
/// that could notice.
///
/// \return  as set_saved_hooks().
bool set_backward_failed(BackwardFailed failed);

/// Calls one of the two functions when the backward pass that the calling thread runs ends.
///
/// \param done  called after all nodes; it may throw, and backward() then throws the same.
/// \param failed  called when the pass has thrown, with what it threw, or null where that is not
///        known. It must not throw.
void at_backward_end(
    std::function<void()> done, std::function<void(const std::exception_ptr& cause)> failed);

}  // namespace ddp
