#include "functional/region.h"

#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/sample_weight.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ddp::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kSaved = "exchange";

at::Tensor sum(const at::Tensor& t, const ProcessGroup& group) {
  auto result = t.clone(at::MemoryFormat::Contiguous);  // autograd may have saved `t`
  ddp::all_reduce(result, c10d::ReduceOp::SUM, group);
  return result;
}

at::Tensor take_part(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  const int64_t length = t.size(dim) / group->getSize();
  return t.narrow(dim, group->getRank() * length, length).clone(at::MemoryFormat::Contiguous);
}

at::Tensor join(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  // The ranks' parts lie one after another, which is the order of the result if nothing comes
  // before `dim`. That result must be no view, which autograd would not let the caller change.
  const bool is_in_order = c10::multiply_integers(t.sizes().slice(0, dim)) == 1;
  auto sizes = t.sizes().vec();
  if (is_in_order) {
    sizes[static_cast<size_t>(dim)] *= group->getSize();
  } else {
    sizes.insert(sizes.begin(), group->getSize());
  }
  auto parts = at::empty(sizes, t.options().memory_format(at::MemoryFormat::Contiguous));
  ddp::all_gather_into_tensor(parts, t.contiguous(), group);
  return is_in_order ? parts : parts.movedim(0, dim).flatten(dim, dim + 1);  // the latter copies
}

at::Tensor reduce_scatter_parts(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  const auto parts = t.unflatten(dim, {group->getSize(), -1}).movedim(dim, 0).contiguous();
  auto result = at::empty(parts.sizes().slice(1), t.options());
  ddp::reduce_scatter_tensor(result, parts, c10d::ReduceOp::SUM, group);
  return result;
}

at::Tensor exchange_rows(const at::Tensor& t, const Exchange& exchange) {
  auto sizes = t.sizes().vec();
  const auto& rows = exchange.output_splits;
  if (!rows.empty()) sizes[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  auto result = at::empty(sizes, t.options());
  ddp::all_to_all_single(
      result, t.contiguous(), exchange.output_splits, exchange.input_splits, exchange.group);
  return result;
}

/// Each exchange's gradient goes through another exchange, by a node of this class again.
class ExchangeNode : public torch::autograd::Function<ExchangeNode> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange) {
    context->saved_data[kSaved] = c10::IValue::make_capsule(exchange);
    return exchange->run(t);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->saved_data[kSaved].toCapsule();
    const auto exchange = c10::static_intrusive_pointer_cast<Exchange>(saved);
    const auto back = exchange->backward();
    const double weight = back->communicates() ? sample_weight() : 1;
    if (weight == 1) return {apply_exchange(gradients[0], back), at::Tensor()};
    return {apply_exchange(gradients[0] * weight, back) / weight, at::Tensor()};
  }
};

}  // namespace

Exchange::Exchange(
    Kind kind, ProcessGroup group, int64_t dim, std::vector<int64_t> input_splits,
    std::vector<int64_t> output_splits)
    : kind(kind),
      group(std::move(group)),
      dim(dim),
      input_splits(std::move(input_splits)),
      output_splits(std::move(output_splits)) {}

c10::intrusive_ptr<Exchange> Exchange::backward() const {
  const auto opposite = [&] {
    switch (kind) {
      case Kind::kCopy:
        return Kind::kSum;
      case Kind::kSum:
        return Kind::kCopy;
      case Kind::kTakePart:
        return Kind::kJoin;
      case Kind::kJoin:
        return Kind::kTakePart;
      case Kind::kJoinToBeSummed:
        return Kind::kReduceScatter;
      case Kind::kReduceScatter:
        return Kind::kJoinToBeSummed;
      case Kind::kAllToAll:
        break;
    }
    return Kind::kAllToAll;
  };
  return c10::make_intrusive<Exchange>(opposite(), group, dim, output_splits, input_splits);
}

at::Tensor Exchange::run(const at::Tensor& t) const {
  switch (kind) {
    // An alias and not the input itself, which would come back as a view that refuses in-place
    // operations.
    case Kind::kCopy:
      return t.detach();
    case Kind::kSum:
      return sum(t, group);
    case Kind::kTakePart:
      return take_part(t, dim, group);
    case Kind::kJoin:
    case Kind::kJoinToBeSummed:
      return join(t, dim, group);
    case Kind::kReduceScatter:
      return reduce_scatter_parts(t, dim, group);
    case Kind::kAllToAll:
      break;
  }
  return exchange_rows(t, *this);
}

at::Tensor apply_exchange(const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange) {
  const bool makes_node = t.requires_grad() && c10::GradMode::is_enabled();
  const bool has_equal_sizes = exchange->kind != Exchange::Kind::kAllToAll;
  record_differentiable_call(exchange->group, t, makes_node, has_equal_sizes);
  return ExchangeNode::apply(t, exchange);
}

}  // namespace ddp::functional
