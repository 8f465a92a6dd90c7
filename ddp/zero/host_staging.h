#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace ddp {

/// A piece of a parameter that is stepped on the host.
struct StagedPiece {
  at::Tensor value;      // the optimizer's parameter, whose memory changes in each step
  at::Tensor parameter;  // 1-D, on the device
  at::Tensor gradient;   // the same
};

/// Host memory in which pieces of parameters on devices are stepped, two windows of pieces in
/// turns: while the host steps one, the parameters of the window before go up, and parameters and
/// gradients of the next come down. The memory is pinned.
///
/// All copies are work of the current streams: what comes after a step on them sees the parameters.
class HostStaging {
 public:
  /// Gives the values memory, without copying anything.
  ///
  /// \param window  the number of the window in this step; it has the memory of the one before
  /// last.
  void place(size_t window, std::vector<StagedPiece> pieces);
  /// place(), and begins to copy parameters and gradients.
  void fetch(size_t window, std::vector<StagedPiece> pieces);
  /// Waits on the host for the copies.
  ///
  /// \return the gradients on the host, by piece.
  const std::vector<at::Tensor>& await(size_t window);
  /// Begins to copy the values to the parameters.
  void put(size_t window);

 private:
  struct Slot {
    at::Tensor memory;  // bytes
    std::vector<StagedPiece> pieces;
    std::vector<at::Tensor> values;     // by piece, in `memory`
    std::vector<at::Tensor> gradients;  // the same
    std::vector<c10::Event> copied;     // by device: the last copies in or out of `memory`
  };
  Slot& slot(size_t window) { return slots_[window % slots_.size()]; }
  static void record(Slot& slot);

  std::array<Slot, 2> slots_;
};

}  // namespace ddp
