// Collectives whose output shares memory with the input, also at another rank's place of it.
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>

#include "support/ranks.h"

#include "support/catch.h"

using c10d::ReduceOp;
using namespace ddp::testing;
using Tensors = std::vector<at::Tensor>;

namespace {

constexpr int kRepeats = 10;  // ranks that are early or late read and write in other orders

/// A collective, whose tensors are parts of `memory`: [ranks, n]. \return  what it wrote.
using Collective = std::function<Tensors(const Tensors& from, Tensors to, const Rank& self)>;

/// Calls it with outputs that are parts of the input, and once more with parts of other memory.
///
/// \param place  of the r-th output, among the parts of the input.
/// \return  how often the results were equal.
int equal_results(
    const Collective& call, const std::function<size_t(size_t)>& place, int64_t numel,
    const Rank& self) {
  int equal = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto memory = at::arange(self.size * numel).view({self.size, numel}).to(at::kFloat) +
                        1000.0 * self.rank + i;
    const auto other = memory.clone();
    const auto parts = [&](const at::Tensor& t, bool placed) {
      Tensors found;
      for (size_t r = 0; r < static_cast<size_t>(self.size); ++r) {
        found.push_back(t[static_cast<int64_t>(placed ? place(r) : r)]);
      }
      return found;
    };
    const auto wanted = call(parts(other, false), parts(other.clone(), false), self);
    const auto got = call(parts(memory, false), parts(memory, true), self);
    equal += at::equal(at::stack(wanted), at::stack(got)) ? 1 : 0;
  }
  return equal;
}

Tensors one(const at::Tensor& t) { return {t}; }

}  // namespace

TEST_CASE("an output may share memory with the input", "[comm][ranks]") {
  const int size = GENERATE(2, 3);
  const int64_t numel = GENERATE(1, 300000);
  const bool crossed = GENERATE(false, true);
  const std::vector<std::pair<const char*, Collective>> collectives{
      {"all_to_all",
       [](const Tensors& from, Tensors to, const Rank& self) {
         ddp::all_to_all(to, from, self.group);
         return to;
       }},
      {"all_gather",
       [](const Tensors& from, Tensors to, const Rank& self) {
         ddp::all_gather(to, from[self.rank], self.group);
         return to;
       }},
      {"gather",
       [](const Tensors& from, Tensors to, const Rank& self) {
         auto none = self.rank == 0 ? to : Tensors();
         ddp::gather(none, from[self.rank], 0, self.group);
         return none.empty() ? one(at::zeros({1})) : none;
       }},
      {"scatter",
       [](const Tensors& from, Tensors to, const Rank& self) {
         ddp::scatter(to[self.rank], self.rank == 0 ? from : Tensors(), 0, self.group);
         return one(to[self.rank]);
       }},
      {"reduce_scatter", [](const Tensors& from, Tensors to, const Rank& self) {
         ddp::reduce_scatter(to[self.rank], from, ReduceOp::SUM, self.group);
         return one(to[self.rank]);
       }}};
  const auto place = [&](size_t r) { return crossed ? (r + 1) % static_cast<size_t>(size) : r; };
  for (const auto& [name, collective] : collectives) {
    CAPTURE(name, size, numel, crossed);
    const auto equal = run_ranks<int>(size, [&, call = collective](const Rank& self) {
      return equal_results(call, place, numel, self);
    });
    CHECK(equal == std::vector<int>(static_cast<size_t>(size), kRepeats));
  }
}

TEST_CASE("one tensor may be all that goes and comes", "[comm][ranks]") {
  const int size = GENERATE(2, 3);
  const int64_t numel = GENERATE(1, 300000);
  const auto equal = run_ranks<int>(size, [&](const Rank& self) {
    const auto call = [&](const Tensors& from, Tensors to, const Rank&) {
      const auto whole = [&](const Tensors& parts) {
        return parts[0].as_strided({self.size * numel}, {1}, 0);
      };
      auto output = whole(to);
      ddp::all_to_all_single(output, whole(from), {}, {}, self.group);
      const auto exchanged = output.clone();
      ddp::all_gather_into_tensor(output, output.narrow(0, 0, numel), self.group);
      const auto gathered = output.clone();
      auto part = output.narrow(0, (self.size - 1 - self.rank) * numel, numel);
      ddp::reduce_scatter_tensor(part, output, ReduceOp::SUM, self.group);
      return Tensors{at::cat({exchanged, gathered, part})};
    };
    return equal_results(
        call, [](size_t r) { return r; }, numel, self);
  });
  CHECK(equal == std::vector<int>(static_cast<size_t>(size), kRepeats));
}
