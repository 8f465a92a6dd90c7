#pragma once

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace ddp {

/// Bytes of pinned memory; of pageable memory where that is used up, or there is none.
at::Tensor pinned_bytes(int64_t count);

/// Copies of tensors in host memory, each with a storage of its own and its elements only.
///
/// Tensors of devices are copied to pinned memory without a wait, in the order of their devices'
/// current streams. They share blocks of it, which live as long as a copy in them. After that
/// LibTorch's allocator of pinned memory keeps the blocks for the next copies: as much as the
/// copies need that exist at a time. Where pinned memory is used up, pageable memory takes its
/// place.
///
/// Threads: one.
class TensorsOnHost {
 public:
  enum class Order { AsItLies, RowByRow };

  TensorsOnHost() = default;
  /// Waits for the copies, where an exception has left out wait().
  ~TensorsOnHost();
  C10_DISABLE_COPY_AND_ASSIGN(TensorsOnHost);

  /// Begins to copy a dense tensor.
  ///
  /// \param order  AsItLies: with its strides where its elements have no gaps.
  /// \return  which has its elements once wait() has returned.
  at::Tensor copy(const at::Tensor& tensor, Order order);
  /// Begins to copy into memory of the caller, which has to be pinned: else the copy waits.
  void copy_into(const at::Tensor& place, const at::Tensor& tensor);
  /// Waits on the host, once for each device, for all copies before. Then the tensors may change.
  void wait();

 private:
  struct Block {
    at::Tensor bytes;
    int64_t used = 0;
  };
  std::shared_ptr<Block> room_for(int64_t bytes);

  std::vector<std::shared_ptr<Block>> blocks_;
  std::set<std::pair<c10::DeviceType, c10::DeviceIndex>> devices_;  // with copies on their way
};

/// Copies of tensors of the host in memory of a device, through one piece of pinned memory.
///
/// Cost: a wait of the host for each 64 MiB, and one at the end.
///
/// Threads: one.
class TensorsToDevice {
 public:
  /// \param bytes  of all tensors.
  TensorsToDevice(c10::Device device, int64_t bytes);
  /// Waits for the copies, where an exception has left out wait().
  ~TensorsToDevice();
  C10_DISABLE_COPY_AND_ASSIGN(TensorsToDevice);

  /// Begins to copy a dense tensor of the host, which may change after that.
  at::Tensor copy(const at::Tensor& tensor);
  void wait();

 private:
  const c10::Device device_;
  const at::Tensor piece_;
  int64_t used_ = 0;
};

}  // namespace ddp
