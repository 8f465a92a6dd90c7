#include "reducer/gradients/gradient_copy.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include "support/catch.h"

namespace ddp {
namespace {

// A tensor of random values in one of several memory layouts.
at::Tensor random_tensor(const std::string& layout, at::ScalarType dtype) {
  const auto t = torch::randn({4, 6, 5, 3}, at::kDouble).to(dtype);
  if (layout == "contiguous") return t;
  if (layout == "channels last") return t.contiguous(at::MemoryFormat::ChannelsLast);
  if (layout == "transposed") return t.transpose(0, 2);
  return torch::randn({4, 6, 5, 6}, at::kDouble).to(dtype).slice(3, 0, 6, 2);  // with gaps
}

/// Counts this thread's calls of operators on lists of tensors, while it lives.
class ForeachCalls {
 public:
  ForeachCalls()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&ForeachCalls::count))) {
    counts().clear();
  }
  ~ForeachCalls() { at::removeCallback(handle_); }
  C10_DISABLE_COPY_AND_ASSIGN(ForeachCalls);

  static std::map<std::string, int>& counts() {
    thread_local std::map<std::string, int> counts;
    return counts;
  }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    const std::string name = call.name();
    if (name.rfind("aten::_foreach_", 0) == 0) ++counts()[name];
    return nullptr;
  }

  at::CallbackHandle handle_;
};

}  // namespace

TEST_CASE("scaled copies have the bits of at::mul_out", "[pure][gradient_copy]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat);
  const std::string to = GENERATE("contiguous", "channels last", "transposed", "gaps");
  const std::string from = GENERATE("contiguous", "channels last", "transposed", "gaps");
  const double scale = GENERATE(1.0, 1.0 / 3);
  CAPTURE(dtype, to, from, scale);
  torch::manual_seed(1);
  auto dst = random_tensor(to, dtype);
  const auto src = random_tensor(from, dtype).reshape(dst.sizes());
  const auto expected = scale == 1.0 ? src.clone() : src.mul(scale);

  copy_scaled(dst, src, scale);
  CHECK(torch::equal(dst, expected));
}

TEST_CASE("scaled copies work for any size, also in parallel", "[pure][gradient_copy]") {
  const int64_t size = GENERATE(0, 1, 7, 32768, 100003);
  const auto src = torch::randn({size});
  auto dst = torch::empty({size});
  copy_scaled(dst, src, 1.0);
  CHECK(torch::equal(dst, src));
  copy_scaled(dst, src, 0.3);
  CHECK(torch::equal(dst, src * 0.3));
  scale_in_place(dst, 0.7);
  CHECK(torch::equal(dst, src * 0.3 * 0.7));
}

TEST_CASE("a conjugate view is copied by value", "[pure][gradient_copy]") {
  const auto src = torch::randn({5}, at::kComplexFloat).conj();
  auto dst = torch::empty({5}, at::kComplexFloat);
  copy_scaled(dst, src, 1.0);
  CHECK(torch::equal(dst, src.resolve_conj()));
}

TEST_CASE("copies together equal copies one by one", "[pure]") {
  const double scale = GENERATE(1.0, 0.5, 1.0 / 3);
  std::vector<at::Tensor> one_by_one, together;
  for (const auto when : {ScaledCopies::When::AtOnce, ScaledCopies::When::Together}) {
    auto& results = when == ScaledCopies::When::AtOnce ? one_by_one : together;
    ScaledCopies copies(scale, when);
    torch::manual_seed(1);
    for (const auto* layout : {"contiguous", "channels last", "transposed", "with gaps"}) {
      const auto source = random_tensor(layout, at::kFloat);
      results.push_back(torch::empty_like(source));
      copies.copy(results.back(), source);
      results.push_back(source.clone());
      copies.scale(results.back());
    }
    copies.finish();
  }
  REQUIRE(together.size() == 8);
  for (size_t i = 0; i < together.size(); ++i) CHECK(torch::equal(together[i], one_by_one[i]));
}

TEST_CASE("a large gradient is scaled while it is copied", "[pure]") {
  const double scale = GENERATE(1.0, 1.0 / 3);
  const int64_t size = GENERATE(100, 1 << 20);
  const auto source = torch::randn({size}), copy = torch::empty({size});
  std::map<std::string, int> calls;
  {
    const ForeachCalls counted;
    ScaledCopies copies(scale, ScaledCopies::When::Together);
    copies.copy(copy, source);
    copies.finish();
    calls = counted.counts();
  }
  CHECK(torch::equal(copy, source * scale));
  std::map<std::string, int> expected{{"aten::_foreach_copy_", 1}, {"aten::_foreach_mul_", 1}};
  if (scale == 1.0) expected.erase("aten::_foreach_mul_");
  if (scale != 1.0 && size > 100) expected.clear();
  CHECK(calls == expected);
}

TEST_CASE("streaming_copy writes every byte and no other", "[pure]") {
  std::vector<unsigned char> source(400), destination(400);
  std::iota(source.begin(), source.end(), static_cast<unsigned char>(0));
  for (size_t from = 0; from < 17; ++from) {
    for (size_t to = 0; to < 17; ++to) {
      for (const size_t bytes : {0, 1, 15, 16, 63, 64, 65, 130, 300}) {
        std::fill(destination.begin(), destination.end(), static_cast<unsigned char>(7));
        streaming_copy(destination.data() + to, source.data() + from, bytes);
        std::vector<unsigned char> expected(400, 7);
        std::copy_n(
            source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
            expected.begin() + static_cast<std::ptrdiff_t>(to));
        REQUIRE(destination == expected);
      }
    }
  }
}

TEST_CASE("copy_scaled copies a large gradient", "[pure]") {
  const auto source = torch::randn({1 << 20});
  const auto destination = torch::empty({1 << 20});
  copy_scaled(destination, source, 1.0);
  CHECK(torch::equal(destination, source));
}

}  // namespace ddp
