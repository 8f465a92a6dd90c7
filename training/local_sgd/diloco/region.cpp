#include "local_sgd/diloco/region.h"

#include <exception>
#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

/// The state of a leader's exchange.
enum Awaited : int64_t { kPending, kReady, kFailed };

// The first problem of the ranks' packed {problem, settings}; "" for none.
std::string find_problem(const std::vector<std::string>& by_rank, const char* what) {
  const auto first = unpacked(by_rank.front());
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto texts = unpacked(by_rank[rank]);
    if (!texts.at(0).empty()) return texts[0];
    if (texts.at(1) == first.at(1)) continue;
    return ddp::str(
        "DiLoCo: expected the same options and parameters on every rank, got [", first[1], "] on ",
        what, " 0 and [", texts[1], "] on ", what, " ", rank, ". Make it alike on every rank.");
  }
  return "";
}

std::vector<std::string> texts_of(const std::string& own, const ProcessGroup& group) {
  return group ? all_gather_strings(own, group) : std::vector<std::string>{own};
}

}  // namespace

Region::Region(
    ProcessGroup leaders, ProcessGroup local, bool is_elastic, const std::string& settings,
    const std::string& problem)
    : leaders_(std::move(leaders)), local_(std::move(local)) {
  // Every rank takes part in all exchanges, whatever it has found: no other rank waits for it.
  const auto of_region =
      texts_of(packed({problem, settings, leaders_ || is_elastic ? "leader" : ""}), local_);
  auto found = find_problem(of_region, "rank");
  int leaders_here = 0;
  for (size_t rank = 0; rank < of_region.size(); ++rank) {
    if (unpacked(of_region[rank]).at(2).empty()) continue;
    if (leaders_here++ == 0) leader_ = static_cast<int>(rank);
  }
  if (found.empty() && leaders_here > 1) {
    found = ddp::str(
        "DiLoCo: expected one rank of a region in the leaders' group, got ", leaders_here, " of ",
        of_region.size(),
        ". Give regions() or coordinator() to one rank of each region, and none to the others.");
  }
  is_leader_ = !local_ || local_->getRank() == leader_;
  if (is_elastic) count_ = 0;
  if (leaders_) {
    found = find_problem(texts_of(packed({found, settings}), leaders_), "the leader of region");
    count_ = leaders_->getSize();
  }
  const auto said = unpacked(
      texts_of(packed({found, std::to_string(count_)}), local_).at(static_cast<size_t>(leader_)));
  DDP_CHECK(said.at(0).empty(), said[0]);
  InputText(said.at(1)) >> count_;
}

void Region::share_values(at::Tensor& values) const {
  if (!local_) return;
  auto carried = values.to(carrier_device(*local_));
  broadcast(carried, leader_, local_);
  values.copy_(carried);
}

int64_t Region::share_number(int64_t number) const {
  auto carried = at::full({1}, number, at::kLong);
  share_values(carried);
  return carried.item<int64_t>();
}

std::string Region::share_text(const std::string& text) const {
  return texts_of(is_leader_ ? text : "", local_).at(static_cast<size_t>(leader_));
}

void Region::share_of_first(at::Tensor& values) const {
  if (leaders_) broadcast(values, /*src=*/0, leaders_);
  share_values(values);
}

void Region::await_leader(c10::function_ref<bool()> is_ready) const {
  int64_t state = kPending;
  std::exception_ptr failure;
  while (state == kPending) {
    if (is_leader_) {
      failure = exception_of([&] { state = is_ready() ? kReady : kPending; });
      if (failure) state = kFailed;
    } else if (is_pretended()) {
      state = kReady;  // stays where there is no leader
    }
    state = share_number(state);
  }
  if (state == kReady) return;
  const auto error = share_text(failure ? text_of(failure) : "");
  if (failure) std::rethrow_exception(failure);
  C10_THROW_ERROR(DistBackendError, error);
}

at::Tensor Region::share(const std::shared_future<at::Tensor>& mean, int64_t elements) const {
  await(mean);
  if (!local_) return mean.get();
  // A pretended rank keeps them.
  auto values = is_leader_ ? mean.get().clone() : at::zeros({elements}, at::kFloat);
  share_values(values);
  return values;
}

}  // namespace ddp
