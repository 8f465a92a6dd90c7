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

PendingExchange start_sum(at::Tensor t, const ProcessGroup& group) {
  auto work = ddp::all_reduce_async(t, c10d::ReduceOp::SUM, group);
  return {t, t, std::move(work)};
}

at::Tensor take_part(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  const int64_t length = t.size(dim) / group->getSize();
  return t.narrow(dim, group->getRank() * length, length).clone(at::MemoryFormat::Contiguous);
}

/// Whether the ranks' parts, which lie one after another, are in the order of the result: if
/// nothing comes before `dim`.
bool joins_in_order(const at::Tensor& t, int64_t dim) {
  return c10::multiply_integers(t.sizes().slice(0, dim)) == 1;
}

/// [W * n, ...] if they are in order, which is no view, for autograd would not let the caller
/// change one; else [W, ...].
PendingExchange start_join(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  auto sizes = t.sizes().vec();
  if (joins_in_order(t, dim)) {
    sizes[static_cast<size_t>(dim)] *= group->getSize();
  } else {
    sizes.insert(sizes.begin(), group->getSize());
  }
  auto parts = at::empty(sizes, t.options().memory_format(at::MemoryFormat::Contiguous));
  const auto own = t.contiguous();
  auto work = ddp::all_gather_into_tensor_async(parts, own, group);
  return {parts, own, std::move(work)};
}

at::Tensor join(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  const auto parts = start_join(t, dim, group).wait();
  if (joins_in_order(t, dim)) return parts;
  return parts.movedim(0, dim).flatten(dim, dim + 1);  // the latter copies
}

PendingExchange start_reduce_scatter(const at::Tensor& t, int64_t dim, const ProcessGroup& group) {
  const auto parts = t.unflatten(dim, {group->getSize(), -1}).movedim(dim, 0).contiguous();
  auto result = at::empty(parts.sizes().slice(1), t.options());
  auto work = ddp::reduce_scatter_tensor_async(result, parts, c10d::ReduceOp::SUM, group);
  return {result, parts, std::move(work)};
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

PendingExchange::PendingExchange(
    at::Tensor result, at::Tensor sent, c10::intrusive_ptr<c10d::Work> work)
    : result_(std::move(result)), sent_(std::move(sent)), work_(std::move(work)) {}

at::Tensor PendingExchange::wait() {
  if (work_) work_->wait();
  sent_.reset();
  return result_;
}

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
    case Kind::kSum:  // autograd may have saved `t`
      return start_sum(t.clone(at::MemoryFormat::Contiguous), group).wait();
    case Kind::kTakePart:
      return take_part(t, dim, group);
    case Kind::kJoin:
    case Kind::kJoinToBeSummed:
      return join(t, dim, group);
    case Kind::kReduceScatter:
      return start_reduce_scatter(t, dim, group).wait();
    case Kind::kAllToAll:
      break;
  }
  return exchange_rows(t, *this);
}

PendingExchange Exchange::start(const at::Tensor& t) const {
  if (kind == Kind::kCopy) return {run(t), {}, {}};
  if (kind == Kind::kSum) return start_sum(t, group);
  TORCH_INTERNAL_ASSERT(
      dim == 0 && (kind == Kind::kJoinToBeSummed || kind == Kind::kReduceScatter));
  return kind == Kind::kReduceScatter ? start_reduce_scatter(t, dim, group)
                                      : start_join(t, dim, group);
}

at::Tensor apply_exchange(const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange) {
  const bool makes_node = t.requires_grad() && c10::GradMode::is_enabled();
  const bool has_equal_sizes = exchange->kind != Exchange::Kind::kAllToAll;
  record_differentiable_call(exchange->group, t, makes_node, has_equal_sizes);
  return ExchangeNode::apply(t, exchange);
}

PendingExchange start_in_backward(
    const at::Tensor& t, const c10::intrusive_ptr<Exchange>& exchange) {
  if (c10::GradMode::is_enabled()) return {apply_exchange(t, exchange), {}, {}};
  record_differentiable_call(exchange->group, t, /*requires_gradient=*/false);
  return exchange->start(t);
}

}  // namespace ddp::functional
