#include "zero/state_tensors.h"

#include <utility>

#include <c10/util/Exception.h>
#include <ddp/internal/optimizer_kinds.h>

namespace ddp {
namespace {

/// Collects the parts of a state.
struct PartCollector {
  StateParts parts;

  void step(const char* /*name*/, int64_t& value) { parts.step = &value; }
  void tensor(const char* /*name*/, at::Tensor& value, bool /*is_required*/) {
    parts.tensors.push_back(&value);
  }
};

}  // namespace

StateParts state_parts(torch::optim::OptimizerParamState& state) {
  PartCollector fields;
  const bool is_known = with_kind(state, [&](auto kind, auto& own) {
    using Kind = decltype(kind);
    if constexpr (Kind::kIsElementwise) visit_state(fields, own, typename Kind::Options(/*lr=*/1));
  });
  TORCH_INTERNAL_ASSERT(is_known);
  return std::move(fields.parts);
}

}  // namespace ddp
