// Sends every dtype through every collective: it either gets the right values, or throws one clear
// error before anything is sent.
#include <ddp/collectives.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using c10d::ReduceOp;
using namespace testing;
using Dtypes = std::set<at::ScalarType>;

constexpr const char* kRight = "right";
constexpr const char* kRefused = "refused";

const Dtypes kQuantized{at::kQInt8, at::kQUInt8, at::kQInt32, at::kQUInt4x2, at::kQUInt2x4};

/// Four elements of that dtype whose bytes depend on the seed; empty if LibTorch cannot make them.
std::optional<at::Tensor> with_bytes(at::ScalarType dtype, int seed) {
  at::Tensor tensor;
  try {
    tensor = kQuantized.count(dtype) != 0
                 ? at::_empty_affine_quantized({4}, at::TensorOptions().dtype(dtype), 1, 0)
                 : at::empty({4}, dtype);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  auto* bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) bytes[i] = (i * 5 + i / 3 + seed) % 3 == 0 ? 1 : 0;
  return tensor;
}

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// Zeros of the dtype of `like`.
at::Tensor blank(const at::Tensor& like) {
  auto tensor = *with_bytes(like.scalar_type(), 0);
  std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  return tensor;
}

/// Copies bytes, because LibTorch cannot copy some dtypes.
at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = blank(tensor);
  std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return copy;
}

/// "right", "wrong", or "refused" for a ValueError that names this rank.
std::string outcome_of(const Rank& self, const std::function<bool()>& is_right) {
  try {
    return is_right() ? kRight : "wrong";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    const auto place = c10::str(" on rank ", self.rank, " of ", self.size, ". ");
    return text.find(place) != std::string::npos ? kRefused : text;
  }
}

using Outcomes = std::map<std::string, std::string>;

/// Runs every collective that moves elements unchanged, between two ranks.
Outcomes movements(const Rank& self, at::ScalarType dtype) {
  const auto own = *with_bytes(dtype, self.rank);
  const std::vector<at::Tensor> of_rank{*with_bytes(dtype, 0), *with_bytes(dtype, 1)};
  const auto& group = self.group;
  const auto other = static_cast<size_t>(1 - self.rank);
  Outcomes seen;
  const auto note = [&](const char* name, const std::function<bool()>& is_right) {
    seen[name] = outcome_of(self, is_right);
  };
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) {
    return bytes_of(a) == bytes_of(b);
  };
  const auto both = [&](const std::vector<at::Tensor>& got) {
    return equal(got[0], of_rank[0]) && equal(got[1], of_rank[1]);
  };
  note("broadcast", [&] {
    auto tensor = *with_bytes(dtype, self.rank);
    broadcast(tensor, 1, group);
    return equal(tensor, of_rank[1]);
  });
  note("all_gather", [&] {
    std::vector<at::Tensor> outputs{blank(own), blank(own)};
    all_gather(outputs, own, group);
    return both(outputs);
  });
  note("gather", [&] {
    std::vector<at::Tensor> outputs;
    if (self.rank == 0) outputs = {blank(own), blank(own)};
    gather(outputs, own, 0, group);
    return self.rank == 1 || both(outputs);
  });
  note("scatter", [&] {
    auto output = blank(own);
    scatter(output, self.rank == 0 ? of_rank : std::vector<at::Tensor>(), 0, group);
    return equal(output, own);
  });
  note("all_to_all", [&] {
    std::vector<at::Tensor> outputs{blank(own), blank(own)};
    all_to_all(outputs, {own, own}, group);
    return both(outputs);
  });
  note("all_to_all_single", [&] {
    auto output = blank(own);
    all_to_all_single(output, own, {}, {}, group);
    const auto half = own.nbytes() / 2;
    return bytes_of(output).substr(other * half, half) ==
           bytes_of(of_rank[other]).substr(static_cast<size_t>(self.rank) * half, half);
  });
  note("all_gather_into_tensor", [&] {
    const auto whole = at::empty({8}, own.options());
    auto output = whole;
    all_gather_into_tensor(output, own, group);
    return bytes_of(output) == bytes_of(of_rank[0]) + bytes_of(of_rank[1]);
  });
  note("send and recv", [&] {
    auto output = blank(own);
    if (self.rank == 0) send(own, 1, 0, group);
    recv(output, static_cast<int>(other), 0, group);
    if (self.rank == 1) send(own, 0, 0, group);
    return equal(output, of_rank[other]);
  });
  return seen;
}

const std::map<std::string, ReduceOp> kOps{
    {"SUM", ReduceOp::SUM}, {"AVG", ReduceOp::AVG},   {"PRODUCT", ReduceOp::PRODUCT},
    {"MIN", ReduceOp::MIN}, {"MAX", ReduceOp::MAX},   {"BAND", ReduceOp::BAND},
    {"BOR", ReduceOp::BOR}, {"BXOR", ReduceOp::BXOR}, {"PREMUL_SUM", c10d::makeNCCLPreMulSum(2.0)}};

/// Elements 1, 3, 0, 1 on rank 0 and 1, 2, 2, 0 on rank 1, reduced in whole numbers.
std::vector<double> reduced(const ReduceOp& op, bool logical) {
  const std::vector<int> a{1, 3, 0, 1};
  const std::vector<int> b{1, 2, 2, 0};
  std::vector<double> result;
  for (size_t i = 0; i < a.size(); ++i) {
    const int x = logical ? static_cast<int>(a[i] != 0) : a[i];
    const int y = logical ? static_cast<int>(b[i] != 0) : b[i];
    const std::map<ReduceOp::RedOpType, double> by_op{
        {ReduceOp::SUM, x + y},
        {ReduceOp::AVG, (x + y) / 2.0},
        {ReduceOp::PRODUCT, x * y},
        {ReduceOp::MIN, std::min(x, y)},
        {ReduceOp::MAX, std::max(x, y)},
        {ReduceOp::BAND, x & y},
        {ReduceOp::BOR, x | y},
        {ReduceOp::BXOR, x ^ y},
        {ReduceOp::PREMUL_SUM, 2.0 * (x + y)}};
    result.push_back(by_op.at(op.op_));
  }
  return result;
}

at::Tensor numbers(const std::vector<double>& values, at::ScalarType dtype) {
  return at::tensor(values, at::kDouble).to(dtype);
}

/// Runs every reduction with every operation.
Outcomes reductions(const Rank& self, at::ScalarType dtype) {
  at::Tensor own;
  try {
    own = numbers(
        self.rank == 0 ? std::vector<double>{1, 3, 0, 1} : std::vector<double>{1, 2, 2, 0}, dtype);
  } catch (const c10::Error&) {
    own = *with_bytes(dtype, self.rank);  // not a dtype of numbers: all reductions are refused
  }
  const auto part = [&](const at::Tensor& whole) { return whole.narrow(0, 2L * self.rank, 2); };
  Outcomes seen;
  for (const auto& [name, op] : kOps) {
    const auto is_sum = [&, &op = op](const at::Tensor& got, bool whole) {
      const auto expected = numbers(reduced(op, dtype == at::kBool), dtype);
      return bytes_of(got) == bytes_of((whole ? expected : part(expected)).contiguous());
    };
    seen["all_reduce " + name] = outcome_of(self, [&, &op = op] {
      auto tensor = copy_of(own);
      all_reduce(tensor, op, self.group);
      return is_sum(tensor, true);
    });
    seen["reduce " + name] = outcome_of(self, [&, &op = op] {
      auto tensor = copy_of(own);
      reduce(tensor, 0, op, self.group);
      return self.rank == 1 || is_sum(tensor, true);
    });
    seen["reduce_scatter " + name] = outcome_of(self, [&, &op = op] {
      auto output = at::empty({2}, own.options());
      reduce_scatter(output, {own.narrow(0, 0, 2), own.narrow(0, 2, 2)}, op, self.group);
      return is_sum(output, false);
    });
    seen["reduce_scatter_tensor " + name] = outcome_of(self, [&, &op = op] {
      auto output = at::empty({2}, own.options());
      reduce_scatter_tensor(output, own, op, self.group);
      return is_sum(output, false);
    });
  }
  return seen;
}

bool can_reduce(at::ScalarType dtype, const std::string& op) {
  const Dtypes real{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
  const Dtypes complex{at::kComplexHalf, at::kComplexFloat, at::kComplexDouble};
  const Dtypes whole{at::kBool, at::kByte, at::kChar, at::kInt, at::kLong};
  const Dtypes without_sign{at::kUInt32, at::kUInt64};
  if (op == "PREMUL_SUM") return false;  // NCCL only
  if (real.count(dtype) != 0) return op[0] != 'B';
  if (complex.count(dtype) != 0) return op == "SUM" || op == "AVG";
  if (whole.count(dtype) != 0) return op != "AVG";
  return without_sign.count(dtype) != 0 && op != "AVG" && op != "MIN" && op != "MAX";
}

std::string op_of(const std::string& call) { return call.substr(call.rfind(' ') + 1); }

std::vector<at::ScalarType> all_dtypes() {
  std::vector<at::ScalarType> dtypes;
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (dtype != at::ScalarType::Undefined && with_bytes(dtype, 0)) dtypes.push_back(dtype);
  }
  return dtypes;
}

}  // namespace

TEST_CASE("every collective moves every dtype", "[comm][ranks][errors]") {
  const auto dtypes = all_dtypes();
  CHECK(dtypes.size() > 40);
  const auto seen = run_ranks<std::vector<Outcomes>>(2, [&](const Rank& self) {
    std::vector<Outcomes> outcomes;
    for (const auto dtype : dtypes) outcomes.push_back(movements(self, dtype));
    return outcomes;
  });
  for (const auto& rank : seen) {
    for (size_t i = 0; i < dtypes.size(); ++i) {
      for (const auto& [call, outcome] : rank[i]) {
        CAPTURE(dtypes[i], call);
        CHECK(outcome == (kQuantized.count(dtypes[i]) != 0 ? kRefused : kRight));
      }
    }
  }
}

TEST_CASE("every dtype is reduced, or refused before anything is sent", "[comm][ranks][errors]") {
  const auto dtypes = all_dtypes();
  const auto seen = run_ranks<std::vector<Outcomes>>(2, [&](const Rank& self) {
    std::vector<Outcomes> outcomes;
    for (const auto dtype : dtypes) {
      if (kQuantized.count(dtype) == 0)
        outcomes.push_back(reductions(self, dtype));
      else
        outcomes.emplace_back();
    }
    auto tensor = at::ones({1});
    all_reduce(tensor, ReduceOp::SUM, self.group);
    TORCH_CHECK(tensor.item<float>() == 2, "the ranks are out of step");
    return outcomes;
  });
  for (const auto& rank : seen) {
    for (size_t i = 0; i < dtypes.size(); ++i) {
      for (const auto& [call, outcome] : rank[i]) {
        CAPTURE(dtypes[i], call);
        CHECK(outcome == (can_reduce(dtypes[i], op_of(call)) ? kRight : kRefused));
      }
    }
  }
}

TEST_CASE("the error of a refused reduction names the supported ones", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    std::string texts;
    const auto note = [&](at::ScalarType dtype, const ReduceOp& op) {
      try {
        auto tensor = at::zeros({2}, dtype);
        all_reduce(tensor, op, self.group);
      } catch (const c10::ValueError& error) {
        texts += error.what_without_backtrace() + std::string("\n");
      }
    };
    note(at::kFloat, ReduceOp::BXOR);
    note(at::kShort, ReduceOp::SUM);
    note(at::kShort, c10d::makeNCCLPreMulSum(2.0));
    note(at::kUInt32, ReduceOp::MAX);
    TORCH_CHECK(false, texts);
  });
  CHECK_THAT(
      errors,
      Each(
          ContainsText("all_reduce: expected a dtype and an operation that backend ") &&
          ContainsText(" can reduce, got BXOR of Float on rank ") &&
          ContainsText(" of 2. Use one of SUM, ") && ContainsText("got SUM of Short on rank ") &&
          ContainsText("got PREMUL_SUM of Short on rank ") &&
          ContainsText("got MAX of UInt32 on rank ") &&
          ContainsText("Convert it first, to one of Byte, Char, Int, Long, Half, Float")));
}

}  // namespace ddp
