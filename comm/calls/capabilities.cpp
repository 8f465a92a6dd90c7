#include <ddp/internal/capabilities.h>

namespace ddp {
namespace {

using ReduceOp = c10d::ReduceOp;

constexpr std::array kOpNames{"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                              "BAND", "BOR", "BXOR",    "PREMUL_SUM", "UNUSED"};

void append(std::string& list, const char* item) { (list += list.empty() ? "" : ", ") += item; }

}  // namespace

ReductionTable::ReductionTable(std::initializer_list<Row> rows) {
  for (const auto& row : rows) {
    for (const auto dtype : row.dtypes) {
      for (const auto op : row.ops) ops_[static_cast<size_t>(dtype)] |= uint16_t{1} << op;
    }
  }
}

std::string ReductionTable::ops_of(at::ScalarType dtype) const {
  std::string names;
  for (size_t op = 0; op < kOpNames.size(); ++op) {
    if (has(dtype, static_cast<Op>(op))) append(names, kOpNames[op]);
  }
  return names;
}

std::string ReductionTable::dtypes_of(Op op) const {
  std::string names;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (has(dtype, op)) append(names, at::toString(dtype));
  }
  return names;
}

const char* to_text(ReductionTable::Op op) { return kOpNames.at(op); }

at::ScalarType reduced_as(at::ScalarType dtype, ReductionTable::Op op) {
  if (at::isComplexType(dtype)) return at::toRealValueType(dtype);
  if (dtype == at::kBool) return at::kByte;
  // Sums, products and bit operations of two's complement do not depend on the sign.
  const bool compares = op == ReduceOp::MIN || op == ReduceOp::MAX;
  if (dtype == at::kUInt32 && !compares) return at::kInt;
  if (dtype == at::kUInt64 && !compares) return at::kLong;
  return dtype;
}

}  // namespace ddp
