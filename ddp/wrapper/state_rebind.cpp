// A wrapper goes on with the ranks of another group.
#include <string>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/text.h>

#include "wrapper/state.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

namespace {

// "" for no order.
std::string to_text(const BucketOrder& order) {
  if (order.parameters.empty()) return "";
  return ddp::str(order.cap_bytes.value_or(0), " ", joined_by(" ", order.parameters));
}

BucketOrder order_from(const std::string& text) {
  BucketOrder order;
  InputText numbers(text);
  int64_t cap = 0;
  if (numbers >> cap && cap > 0) order.cap_bytes = cap;
  for (size_t parameter = 0; numbers >> parameter;) order.parameters.push_back(parameter);
  return order;
}

}  // namespace

void State::check_no_overlap() const {
  DDP_CHECK(
      !steps_by_bucket_ || sharded_optimizers_ == 0,
      "rebind: expected no ZeroRedundancyOptimizer of this model with overlap, got one on ",
      monitor().rank_text(), ". Destroy it, and load a checkpoint into a new one.");
}

// The gradients of a pass that failed are not whole, and some lie in memory of the old group.
void State::drop_gradients() {
  for (const auto& p : reducer_->parameters()) p.tensor.mutable_grad().reset();
}

// The order that a rank brings along. The ranks that have one have the same: it was agreed on in
// the group before. A rank that joins has none.
BucketOrder State::agreed_order() {
  const auto texts = gather_strings(
      to_text(reducer_->bucket_order()), group(), "agreeing on the order of the buckets",
      &monitor());
  for (const auto& text : texts) {
    if (!text.empty()) return order_from(text);
  }
  return {};
}

void State::rebind(const ProcessGroup& group, CommHook hook) {
  check_between_steps("rebind");
  if (hook) check_hook_fits("rebind");
  auto previous = std::exchange(in_group_, std::make_unique<InGroup>(*this, group));
  auto previous_hook = hook_;
  try {
    auto parameters = agreed_parameters(Sync::Descriptions);
    const auto order = agreed_order();
    if (hook) hook_ = std::move(hook);
    drop_gradients();
    build_reducer(std::move(parameters), order);
  } catch (...) {
    in_group_ = std::move(previous);
    hook_ = std::move(previous_hook);
    throw;
  }
}

}  // namespace ddp
