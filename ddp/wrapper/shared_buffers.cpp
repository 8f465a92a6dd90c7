#include "wrapper/shared_buffers.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>

namespace ddp {

void SharedBuffers::expect_changes() {
  if (std::exchange(may_differ_, true) || !enabled_ || !on_accelerator_) return;
  versions_.clear();
  for (const auto& buffer : finder_.find().tensors) {
    if (buffer.is_cpu() || buffer.is_inference()) continue;
    versions_[buffer.unsafeGetTensorImpl()] = buffer._version();
  }
  on_accelerator_ = !versions_.empty();
}

void SharedBuffers::start(int source, c10d::ProcessGroup& group) {
  if (!enabled_) return;
  found_ = finder_.find();
  on_accelerator_ = std::any_of(
      found_.tensors.begin(), found_.tensors.end(), [](const auto& t) { return !t.is_cpu(); });
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
