// Copies between pinned host memory and a device. They run on streams of their own beside the one
// that computes: one up and one down for each device.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace ddp {

/// 1-D host memory that a device copies from and to while the host goes on. Not initialized.
at::Tensor pinned_memory(int64_t numel, at::ScalarType dtype);

/// The end of a copy.
class CopyEnd {
 public:
  /// The current stream of the device has begun the copy.
  void record(c10::Device device);
  /// The current stream of the device waits for it, and not the host.
  void block(c10::Device device) const;
  /// Whether no copy is on its way any more. Does not wait.
  bool is_over() const { return !event_ || event_->query(); }
  /// The host waits. Nothing where no copy is on its way.
  void await();

 private:
  std::optional<c10::Event> event_;
};

/// Begins to copy a tensor to host memory, after what the current stream of its device has to do.
/// The tensor's memory may be freed at once.
///
/// \param end  for await(), before the host reads the result.
/// \return  1-D.
///
/// Blocks: no.
at::Tensor copy_down(const at::Tensor& values, CopyEnd& end);

}  // namespace ddp
