// Which reductions a backend can do, as data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include <c10/core/ScalarType.h>
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

}  // namespace ddp
