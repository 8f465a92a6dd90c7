// Between passes, once: makes the ranks agree on the order of gradients, and on the tuned cap.
#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/tensor.h>
#include <ddp/internal/check.h>

#include "engine/engine.h"

namespace ddp {
namespace {

bool is_permutation(std::vector<size_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

}  // namespace

/// \return  the cap in bytes that this rank chooses, from its own times and the ranks' link cost.
int64_t Reducer::Engine::tune() {
  const auto where = [] { return std::string("measuring what the link costs"); };
  LinkCost cost;
  monitor_->abort_on_error(where, [&] {
    cost = observers_.tuner->link_cost(
        buckets_.gradient_bytes(), buckets_.size(),
        [&](c10d::Work& work) { wait_for(work, where); });
  });
  // The input of this rank, or of all ranks, ended before enough passes were measured.
  if (!observers_.tuner->has_enough() || !std::isfinite(cost.ms_per_byte)) {
    return kDefaultBucketCapBytes;
  }
  observers_.tuned = choose_bucket_cap(
      extents_of(buckets_.parameters()), [&](int64_t cap) { return schedule_.plan_under(cap); },
      observers_.tuner->step_times(), cost);
  return bytes_of_mb(observers_.tuned->cap_mb);
}

// All ranks take rank `source`'s order of gradients, and with it the cap where that is tuned.
void Reducer::Engine::agree_on_order() {
  const auto where = [] { return std::string("agreeing on the order of the buckets"); };
  const auto& own = schedule_.order();
  std::vector<int64_t> mine(own.begin(), own.end());
  const bool tunes = observers_.tuner != nullptr;
  if (tunes) mine.push_back(tune());
  auto agreed = at::tensor(mine, at::kLong).to(buckets_.parameters().front().tensor.device());
  monitor_->abort_on_error(where, [&] {
    if (group_->getSize() == 1) return;
    std::vector<at::Tensor> tensors{agreed};
    c10d::BroadcastOptions options;
    options.rootRank = pass_->terms.source;
    wait_for(*group_->broadcast(tensors, options), where);
    agreed = tensors.front().cpu();
  });
  agreed = agreed.cpu();
  const auto* begin = agreed.const_data_ptr<int64_t>();
  std::vector<size_t> order(begin, begin + own.size());
  monitor_->abort_on_error(where, [&] {
    DDP_CHECK(
        is_permutation(order),
        "expected an order of the buckets, got something else: a rank communicates out of turn. "
        "Every rank has to run the same collectives");
  });
  take_order(std::move(order), tunes ? std::optional<int64_t>(begin[own.size()]) : std::nullopt);
}

void Reducer::Engine::take_order(std::vector<size_t> order, std::optional<int64_t> cap) {
  if (cap) {
    if (!observers_.tuned) observers_.tuned.emplace();
    set_choice(*observers_.tuned, *cap);
    observers_.tuner.reset();
  }
  schedule_.set_order(std::move(order), cap);
}

void Reducer::Engine::set_bucket_order(const BucketOrder& order) {
  DDP_CHECK(
      order.parameters.size() == buckets_.parameters().size() && is_permutation(order.parameters),
      "Reducer: expected an order of the ", buckets_.parameters().size(),
      " parameters, got another one. Use the order of a reducer of the same parameters.");
  take_order(order.parameters, order.cap_bytes);
  rebuild_buckets();
}

}  // namespace ddp
