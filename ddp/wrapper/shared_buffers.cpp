#include "wrapper/shared_buffers.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ddp/detail/running_statistics.h>
#include <ddp/internal/ranges.h>
#include <torch/nn/modules/batchnorm.h>

namespace ddp {

// The names of buffers do not tell: a module of the program's own may compute with buffers of the
// same names.
bool detail::has_running_statistics(const torch::nn::Module& owner) {
  if (!owner.is_training()) return false;
  return owner.as<torch::nn::BatchNorm2dImpl>() || owner.as<torch::nn::BatchNorm1dImpl>() ||
         owner.as<torch::nn::BatchNorm3dImpl>() ||
         dynamic_cast<const detail::HasRunningStatistics*>(&owner) != nullptr;
}

// Anew each time: modules may assign new buffers, replace children and register further ones.
SharedBuffers::Found SharedBuffers::find() const {
  Found found;
  SeenTensors seen;
  collect(module_, "", seen, found);
  return found;
}

void SharedBuffers::collect(
    const torch::nn::Module& owner, const std::string& prefix, SeenTensors& seen,
    Found& found) const {
  std::vector<at::Tensor> own;
  if (ignored_.empty()) {  // building names takes time
    own = owner.buffers(/*recurse=*/false);
  } else {
    for (const auto& b : owner.named_buffers(/*recurse=*/false)) {
      if (!ignored_.count(prefix + b.key())) own.push_back(b.value());
    }
  }
  const bool are_statistics = own.size() >= 2 && detail::has_running_statistics(owner);
  for (const auto& buffer : own) {
    if (!buffer.defined() || !seen.add(buffer)) continue;
    found.tensors.push_back(buffer);
    if (are_statistics) found.running_statistics.insert(buffer.unsafeGetTensorImpl());
  }
  if (ignored_.empty()) {
    for (const auto& child : owner.children()) collect(*child, prefix, seen, found);
    return;
  }
  for (const auto& child : owner.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", seen, found);
  }
}

void SharedBuffers::expect_changes() {
  if (std::exchange(may_differ_, true) || !enabled_ || !on_accelerator_) return;
  versions_.clear();
  for (const auto& buffer : find().tensors) {
    if (buffer.is_cpu() || buffer.is_inference()) continue;
    versions_[buffer.unsafeGetTensorImpl()] = buffer._version();
  }
  on_accelerator_ = !versions_.empty();
}

void SharedBuffers::start(int source, c10d::ProcessGroup& group) {
  if (!enabled_) return;
  found_ = find();
  on_accelerator_ = any_of(found_.tensors, [](const auto& t) { return !t.is_cpu(); });
  broadcast_.start(found_.tensors, source, group);
}

void SharedBuffers::finish(c10::function_ref<void(c10d::Work&)> wait) {
  broadcast_.finish(
      wait, [this](const auto& buffer, const auto& received) { write(buffer, received); });
  if (!written_.empty()) {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(written_, received_);
    written_.clear();
    received_.clear();
  }
  found_ = {};
  may_differ_ = false;
  may_be_read_ = false;
}

void SharedBuffers::write(const at::Tensor& buffer, const at::Tensor& received) {
  const bool is_unread =
      !may_be_read_ && found_.running_statistics.count(buffer.unsafeGetTensorImpl()) > 0;
  if (!buffer.is_cpu()) {
    // All at the end: one kernel for many buffers.
    written_.push_back(buffer.variable_data());
    received_.push_back(received);
    if (!is_unread && !is_unchanged(buffer)) buffer.unsafeGetTensorImpl()->bump_version();
  } else if (is_unread) {
    overwrite_unversioned(buffer, received);
  } else if (!have_equal_bytes(buffer, received)) {
    overwrite(buffer, received);
  }
}

// Compares versions, not values: for values the host would wait for the accelerator.
bool SharedBuffers::is_unchanged(const at::Tensor& buffer) const {
  if (buffer.is_inference()) return true;
  const auto before = versions_.find(buffer.unsafeGetTensorImpl());
  return before != versions_.end() && before->second == buffer._version();
}

}  // namespace ddp
