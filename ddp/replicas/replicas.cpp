// Checks whether the ranks' models are still the same.
#include <ddp/replicas.h>

#include <unordered_set>
#include <utility>

#include <ATen/core/functional.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <ddp/zero.h>

#include "replicas/replica_check.h"
#include "replicas/vote.h"
#include "wrapper/state.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

namespace {

constexpr const char* kExpectedEqual =
    "check_replicas: expected the same values on every rank, but ";
constexpr const char* kExpectedEqualFirst =
    "DistributedDataParallel: expected the ranks' models to be equal in the first averaged "
    "backward pass, but ";
constexpr const char* kRule =
    ". What changes parameters, buffers, learning rates or the optimizer's state has to do so on "
    "every rank alike.";
constexpr const char* kRemedyOnPurpose =
    " Where they differ on purpose, check_replicas_every(0) leaves out this comparison.";
constexpr const char* kRemedy =
    " model->refresh() gives all ranks rank 0's parameters and buffers.";
// In place of kRemedy: rank 0 may be the wrong one.
constexpr const char* kRemedyOfVote =
    " If the program does the same on every rank, memory or computation there is wrong: take the "
    "host, or its GPU, out of the job.";
constexpr const char* kHashAlone =
    "a hash of them differed while gradients were averaged, and does no more.";
// Begins the name of such a tensor.
constexpr const char* kOutside = "of no module: ";
constexpr const char* kRemedyOutside =
    " A tensor of no module is averaged after model->also_average({tensor}).";

// Finds the tensors that optimizers step and that belong to no module.
class OutsideTensors {
 public:
  explicit OutsideTensors(const std::vector<at::Tensor>& known) {
    for (const auto& tensor : known) known_.insert(tensor.unsafeGetTensorImpl());
  }

  void add(const torch::optim::Optimizer& optimizer, std::vector<StateTensor>& state) {
    const auto& groups = optimizer.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& parameters = groups[g].params();
      for (size_t p = 0; p < parameters.size(); ++p) {
        const bool is_new = known_.insert(parameters[p].unsafeGetTensorImpl()).second;
        if (!is_new || !parameters[p].defined()) continue;
        state.push_back({ddp::str(kOutside, p, " of parameter group ", g), parameters[p]});
      }
    }
  }

 private:
  std::unordered_set<const void*> known_;
};

/// Parameters and buffers of which the ranks of the group have the same elements.
std::vector<StateTensor> replicated_state(
    const torch::nn::Module& module, const c10d::ProcessGroup& group) {
  std::unordered_set<const void*> cut;
  for (const auto& layout : layouts_of(module)) {
    if (is_cut_over(layout, group)) cut.insert(layout.local.unsafeGetTensorImpl());
  }
  auto state = module_state(module, {});
  drop_if(state, [&](const auto& s) { return cut.count(s.tensor.unsafeGetTensorImpl()) > 0; });
  return state;
}

// A hash of the values of parameters and optimizers, and one of buffers.
std::vector<std::string> hashes_of_kinds(const std::vector<ReplicaValue>& values) {
  uint64_t of_buffers = 0, of_others = 0;
  for (const auto& [item, tensor] : values) {
    auto& hash = item.kind == "buffer" ? of_buffers : of_others;
    hash = mixed(hash, fnv1a(item.value));
  }
  return {std::to_string(of_others), std::to_string(of_buffers)};
}

}  // namespace

bool replicas_equal(const torch::nn::Module& module, const GroupArg& group) {
  if (group.get()->getSize() == 1) return true;
  const auto monitor = monitor_of(group.get());
  monitor->check();
  Description mine;
  const auto error = exception_of([&] {
    for (const auto& value : replica_values(replicated_state(module, *group.get()))) {
      mine.push_back(value.item);
    }
  });
  return gather_if_hashes_differ("replicas", mine, error, group.get(), *monitor).empty();
}

std::vector<ReplicaValue> State::values_to_check(
    const std::vector<torch::optim::Optimizer*>& optimizers) const {
  auto state = tensors_.state(shares_buffers());
  auto known = wrapped().parameters();
  known.insert(known.end(), tensors_.outside().begin(), tensors_.outside().end());
  OutsideTensors outside(known);
  std::vector<ReplicaValue> values;
  const auto add = [&](const torch::optim::Optimizer& optimizer) {
    outside.add(optimizer, state);
    for (auto& value : replica_values(optimizer, wrapped(), tensors_.ignored())) {
      values.push_back(std::move(value));
    }
  };
  if (optimizer_) add(*optimizer_);
  for (const auto* optimizer : optimizers) {
    DDP_CHECK_VALUE(
        optimizer, "check_replicas: expected optimizers, got a null pointer on ",
        monitor().rank_text(), ". Pass {&optimizer}.");
    if (optimizer != optimizer_.get()) add(*optimizer);
  }
  for (auto& value : replica_values(state)) values.push_back(std::move(value));
  return values;
}

std::string State::describe_drift(
    const std::vector<torch::optim::Optimizer*>& optimizers, const char* expectation) const {
  std::vector<ReplicaValue> values;
  const auto error = exception_of([&] { values = values_to_check(optimizers); });
  const auto buffers = buffers_->may_differ() ? Buffers::Own : Buffers::Shared;
  const auto difference = describe_replica_difference(values, buffers, error, group(), monitor());
  if (difference.empty()) return {};
  const bool is_outside = difference.find(kOutside) != std::string::npos;
  return ddp::str(
      expectation, difference, kRule, options_.init_sync() && !options_.vote() ? kRemedy : "",
      is_outside ? kRemedyOutside : "", expectation == kExpectedEqualFirst ? kRemedyOnPurpose : "");
}

void State::also_compare(std::vector<torch::optim::Optimizer*> optimizers) {
  for (const auto* optimizer : optimizers) {
    DDP_CHECK_VALUE(
        optimizer, "also_compare: expected optimizers, got a null pointer on ",
        monitor().rank_text(), ". Pass {&optimizer}.");
    DDP_CHECK_VALUE(
        !dynamic_cast<const ZeroRedundancyOptimizerBase*>(optimizer),
        "also_compare: expected optimizers with the same state on every rank, got a "
        "ZeroRedundancyOptimizer on ",
        monitor().rank_text(), ", of whose state each rank has another part. Leave it out.");
  }
  compared_ = std::move(optimizers);
}

uint64_t State::hash_of_compared() const {
  uint64_t hash = 0;
  const auto add = [&](const torch::optim::Optimizer& optimizer) {
    for (const auto& value : replica_values(optimizer, wrapped(), tensors_.ignored())) {
      hash = mixed(hash, fnv1a(value.item.value));
    }
  };
  if (optimizer_ && options_.vote()) add(*optimizer_);
  for (const auto* optimizer : compared_) add(*optimizer);
  return hash;
}

/// Names the wrong ranks where the options ask for it.
///
/// \param text  the error without them.
/// \param values  by which this rank votes.
PassError State::voted(std::string text, std::vector<std::string> values) const {
  if (!options_.vote()) return {std::move(text), {}};
  const auto texts = gather_strings(
      text_of(Ballot{std::move(values), host_name(), monitor().job_rank(monitor().rank())}),
      group(), "voting on the ranks' replicas", &monitor());
  const auto ballots = c10::fmap(texts, ballot_of);
  auto verdict = vote(ballots);
  return {ddp::str(text, " ", describe(verdict, ballots), kRemedyOfVote), std::move(verdict.wrong)};
}

void State::check_replicas(const std::vector<torch::optim::Optimizer*>& optimizers) {
  check_between_steps("check_replicas");
  monitor().check();
  if (group()->getSize() == 1) return;
  const auto drift = describe_drift(optimizers, kExpectedEqual);
  if (drift.empty()) return;
  const auto values = options_.vote() ? values_to_check(optimizers) : std::vector<ReplicaValue>();
  const auto error = voted(drift, hashes_of_kinds(values));
  monitor().throw_agreed(error.text, error.wrong_ranks);
}

PassError State::error() {
  const auto found = replica_check_.finish(monitor());
  if (auto verdict = replay_.take_verdict(); !verdict.text.empty()) {
    return {std::move(verdict.text), std::move(verdict.wrong)};
  }
  if (found == PassReplicaCheck::Found::Nothing) return {};
  const bool is_first = found == PassReplicaCheck::Found::InFirst;
  auto drift = describe_drift(compared_, is_first ? kExpectedEqualFirst : kExpectedEqual);
  if (drift.empty() && options_.vote()) drift = ddp::str(kExpectedEqual, kHashAlone);
  if (drift.empty()) return {};
  return voted(std::move(drift), {std::to_string(replica_check_.hash())});
}

}  // namespace ddp
