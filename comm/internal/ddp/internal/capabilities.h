#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddp {

/// The dtypes that a backend reduces, and the operations for each.
class ReductionTable {
 public:
  using Op = c10d::ReduceOp::RedOpType;
  /// Each of the operations on each of the dtypes.
  struct Row {
    std::initializer_list<at::ScalarType> dtypes;
    std::initializer_list<Op> ops;
  };

  ReductionTable(std::initializer_list<Row> rows);

  bool has(at::ScalarType dtype, Op op) const {
    return (ops_[static_cast<size_t>(dtype)] >> op & 1) != 0;
  }
  /// "SUM, PRODUCT"; "" where the backend does not reduce that dtype.
  std::string ops_of(at::ScalarType dtype) const;
  /// "Float, Double"; "" where the backend has no such operation.
  std::string dtypes_of(Op op) const;

 private:
  std::array<uint16_t, static_cast<size_t>(at::ScalarType::NumOptions)> ops_{};  // bit 1 << Op
};

/// "SUM".
const char* to_text(ReductionTable::Op op);

/// The dtype whose reduction gives the right bits in memory of `dtype`: a real dtype for complex
/// numbers, bytes for bool, the signed dtype for unsigned whole numbers if the operation does not
/// depend on the sign.
at::ScalarType reduced_as(at::ScalarType dtype, ReductionTable::Op op);

/// The abilities of a backend beyond c10d's requirements. The defaults suit any backend.
struct BackendCapabilities {
  /// It averages floating-point tensors (ReduceOp::AVG) as fast as it adds them up: one pass over
  /// the memory less than dividing before a sum, and it cannot overflow either.
  bool averages = false;
  /// It reduces tensors from its allocateTensor() without copies in and out, so buckets should lie
  /// there. Only if Backend::supportsTensorAlloc() is true for the device. All ranks must have the
  /// same value; the wrapper compares the values when it is made (with init_sync).
  bool reduces_in_own_memory = true;
  /// Its allocateTensor() works by now: NCCL's throws until a collective has connected the ranks,
  /// which is at the same call on all of them. Of a group; true in a description.
  bool has_own_memory = true;
  /// A wait for one of its collectives holds up the current stream, and not the host.
  bool waits_on_stream = false;
  /// A watchdog of its own completes Work::getFutureResult() when a collective has ended on the
  /// device, also one that it ends itself after its timeout.
  bool reports_results = false;
  /// Its allreduce() takes sparse tensors.
  bool reduces_sparse = true;
  /// Gloo carries the collectives that the backend does not carry itself. For Gloo: all of them.
  bool falls_back_to_gloo = false;
  /// Its alltoall() takes one tensor per rank. If not, its alltoall_base() takes one flat tensor.
  bool exchanges_lists = true;
  /// Its recvAnysource() works.
  bool receives_from_any = true;
  /// The reductions that it supports; others are refused before anything is sent. Null: unknown, so
  /// the backend itself reports what it does not support.
  const ReductionTable* reductions = nullptr;
};

/// Returns what the group's backend for `device` can do.
///
/// A group of this library has looked its backends up in the registry when it was made, by the name
/// that it was made with. In a group of another class the backend's getBackendName() is searched
/// for. A backend that is not registered has the defaults.
BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
