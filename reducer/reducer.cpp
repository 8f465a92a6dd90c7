#include <ddp/reducer.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "bucket.h"
#include "bucket_plan.h"
#include "problem_report.h"

namespace ddp {
namespace {

std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters) {
  std::vector<ParameterExtent> extents;
  for (const auto& p : parameters) {
    extents.push_back(
        {static_cast<int64_t>(p.tensor.nbytes()), p.tensor.scalar_type(), p.tensor.device(),
         p.expect_sparse});
  }
  return extents;
}

// Backends sum real numbers; a sum of complex numbers is the sum of their parts.
at::Tensor as_real(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

const std::vector<NamedParameter>& checked(const std::vector<NamedParameter>& parameters) {
  TORCH_CHECK_VALUE(
      !parameters.empty(),
      "Reducer: expected at least one parameter, got none. Nothing needs to be reduced.");
  for (const auto& p : parameters) {
    TORCH_CHECK_VALUE(
        p.tensor.defined() && p.tensor.is_leaf() && p.tensor.requires_grad(),
        "Reducer: expected leaf tensors that require a gradient, got \"", p.name,
        p.tensor.defined() ? "\", which does not." : "\", which is undefined.");
  }
  return parameters;
}

}  // namespace

/// Tells the reducer that the gradient of one parameter was accumulated.
class Reducer::GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer& reducer, size_t index) : reducer_(reducer), index_(index) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    reducer_.on_gradient(index_);
    return outputs;
  }

 private:
  Reducer& reducer_;
  size_t index_;
};

Reducer::Reducer(
    std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      caps_(bucket_caps_bytes(options.bucket_cap_mb(), options.bucket_cap_mb_list())),
      slots_(checked(parameters_).size()),
      ready_order_(parameters_.size()),
      used_(parameters_.size(), 0) {
  // Until it is known in which order gradients become ready, small buckets would mostly wait for
  // each other: as c10d, everything goes together in the first backward pass, unless the buckets
  // have to last.
  const bool lasting = options_.find_unused_parameters() || !options_.bucket_cap_mb_list().empty();
  auto plan = plan_buckets(
      extents_of(parameters_), lasting ? caps_ : std::vector<int64_t>{kUnlimitedBytes});
  // Gradients come roughly in reverse registration order.
  std::reverse(plan.buckets.begin(), plan.buckets.end());
  build_buckets(std::move(plan.buckets));
  register_hooks();
}

Reducer::~Reducer() {
  for (size_t i = 0; i < accumulators_.size(); ++i) accumulators_[i]->del_post_hook(hook_keys_[i]);
}

void Reducer::register_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    hook_keys_.push_back(accumulator->add_post_hook(std::make_unique<GradientHook>(*this, i)));
    accumulators_.push_back(std::move(accumulator));  // the parameter itself holds it weakly
  }
}

void Reducer::build_buckets(std::vector<std::vector<size_t>> plan) {
  const at::NoGradGuard no_grad;
  const auto status_size =
      1 + (options_.find_unused_parameters() ? static_cast<int64_t>(parameters_.size()) : 0);
  buckets_.clear();
  buckets_.reserve(plan.size());
  for (size_t b = 0; b < plan.size(); ++b) {
    for (const size_t index : plan[b]) slots_[index].bucket = b;
    const bool last = b + 1 == plan.size();
    buckets_.emplace_back(parameters_, std::move(plan[b]), last ? status_size : 0);
  }
  choose_status();
}

// The status travels for nothing behind the last bucket, where that one is summed as real numbers;
// a communication hook may do anything with a bucket, so beside one it travels alone.
void Reducer::choose_status() {
  const auto& last = buckets_.back();
  status_in_last_bucket_ = !comm_hook_ && !last.is_sparse() && !last.storage().is_complex();
  if (status_in_last_bucket_) {
    status_ = last.tail();
  } else {
    const auto size =
        1 + (options_.find_unused_parameters() ? static_cast<int64_t>(parameters_.size()) : 0);
    status_ = at::zeros({size}, at::dtype(at::kFloat).device(parameters_.front().tensor.device()));
  }
}

std::vector<std::vector<size_t>> Reducer::bucket_indices() const {
  std::vector<std::vector<size_t>> indices;
  for (const auto& bucket : buckets_) indices.push_back(bucket.indices());
  return indices;
}

void Reducer::register_comm_hook(CommHook hook) {
  TORCH_CHECK_VALUE(hook, "register_comm_hook: expected a hook, got an empty function.");
  TORCH_CHECK(
      !comm_hook_,
      "register_comm_hook: a communication hook is registered already. It can be set only once; "
      "compose hooks in one function instead.");
  TORCH_CHECK(
      !has_reduced_ && phase_ != Phase::Reducing,
      "register_comm_hook: expected to be called before the first backward pass.");
  comm_hook_ = std::move(hook);
  choose_status();
}

bool Reducer::records_ready_order() const {
  return !has_rebuilt_buckets_ && !has_reduced_ && !options_.find_unused_parameters();
}

void Reducer::prepare_for_forward() {
  if (phase_ == Phase::Reducing) {
    // Autograd abandoned the pass, and with it our callback: buckets may be in flight whose other
    // halves never come.
    if (group_->getSize() > 1) {
      break_off(
          "the last backward pass",
          c10::str(
              "it ended in an exception after ", next_bucket_, " of ", buckets_.size(),
              " buckets were sent"));
    }
    callback_queued_ = false;
    phase_ = Phase::Local;
  }
  TORCH_CHECK(phase_ != Phase::Broken, broken_because_);
  if (has_reduced_ && !has_rebuilt_buckets_ && !options_.find_unused_parameters()) {
    rebuild_buckets();
  }
}

void Reducer::rebuild_buckets() {
  std::vector<int64_t> mine(ready_order_.begin(), ready_order_.end());
  auto order = at::tensor(mine, at::kLong).to(parameters_.front().tensor.device());
  std::vector<at::Tensor> tensors{order};
  or_break_off(
      [] { return std::string("agreeing on the order of the buckets"); },
      [&] {
        if (group_->getSize() > 1) group_->broadcast(tensors)->wait();
      });
  order = order.cpu();
  const auto* begin = order.const_data_ptr<int64_t>();
  const std::vector<size_t> agreed(begin, begin + order.numel());

  build_buckets(plan_buckets(extents_of(parameters_), caps_, agreed).buckets);
  if (options_.gradient_as_bucket_view()) {
    const at::NoGradGuard no_grad;
    for (auto& bucket : buckets_) bucket.adopt_gradients();
  }
  has_rebuilt_buckets_ = true;
}

void Reducer::prepare_for_backward() {
  TORCH_CHECK(phase_ != Phase::Broken, broken_because_);
  if (phase_ == Phase::Reducing) return;  // a forward inside a backward pass
  for (auto& slot : slots_) slot.ready = false;
  for (auto& bucket : buckets_) bucket.pending = bucket.indices().size();
  next_bucket_ = 0;
  if (records_ready_order()) ready_count_ = 0;
  phase_ = Phase::Armed;
}

void Reducer::on_gradient(size_t index) {
  if (options_.find_unused_parameters() && parameters_[index].tensor.mutable_grad().defined()) {
    used_[index] = 1;
  }
  const auto phase = phase_.load(std::memory_order_acquire);
  if (phase == Phase::Local || phase == Phase::Broken) return;
  if (!callback_queued_.load(std::memory_order_relaxed)) begin_backward();
  mark_ready(index);
}

void Reducer::begin_backward() {
  if (callback_queued_.exchange(true)) return;
  phase_ = Phase::Reducing;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
}

void Reducer::mark_ready(size_t index) {
  auto& slot = slots_[index];
  if (slot.ready) {
    note_problem(
        {c10::str("the gradient of ", parameters_[index].name, " became ready twice in one "
                  "backward pass"),
         "Use a parameter in one autograd graph only per backward pass."});
    return;
  }
  slot.ready = true;
  if (records_ready_order()) ready_order_[ready_count_.fetch_add(1)] = index;
  if (buckets_[slot.bucket].pending.fetch_sub(1) == 1) launch_ready_buckets();
}

void Reducer::launch_ready_buckets() {
  const std::lock_guard<std::mutex> lock(launch_mutex_);
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    launch(next_bucket_++);
  }
}

void Reducer::launch(size_t index) {
  const at::NoGradGuard no_grad;
  auto& bucket = buckets_[index];
  const bool last = index + 1 == buckets_.size();
  std::vector<char> unused;
  if (options_.find_unused_parameters()) {
    unused = pick(used_, bucket);
    for (auto& flag : unused) flag = !flag;
  }
  const double scale = comm_hook_ ? 1.0 : 1.0 / group_->getSize();
  for (auto& what : bucket.gather(scale, unused)) {
    note_problem({std::move(what), "Convert it in a hook on the parameter, or the parameter."});
  }
  or_break_off(
      [&] { return c10::str("starting bucket ", index); },
      [&] {
        if (last && status_in_last_bucket_) send_status();
        start_reducing(index);
        if (last && !status_in_last_bucket_) send_status();
      });
}

void Reducer::start_reducing(size_t index) {
  auto& bucket = buckets_[index];
  if (comm_hook_) {
    const bool last = index + 1 == buckets_.size();
    GradBucket view(index, last, bucket.gradients(), bucket.views(), bucket.parameters());
    bucket.future = comm_hook_(view);
    TORCH_CHECK(bucket.future, "the communication hook returned no future");
  } else if (group_->getSize() > 1) {
    std::vector<at::Tensor> wire{
        bucket.is_sparse() ? bucket.gradients() : as_real(bucket.storage())};
    bucket.work = group_->allreduce(wire);
  }
}

void Reducer::send_status() {
  status_[0].fill_(static_cast<double>(problems_.size()));
  if (options_.find_unused_parameters()) {
    const auto count = static_cast<int64_t>(used_.size());
    status_.narrow(0, 1, count).copy_(at::from_blob(used_.data(), {count}, at::kChar));
  }
  if (!status_in_last_bucket_ && group_->getSize() > 1) {
    std::vector<at::Tensor> wire{status_};
    status_work_ = group_->allreduce(wire);
  }
}

void Reducer::finish_backward() {
  if (phase_ != Phase::Reducing) return;
  callback_queued_ = false;
  const at::NoGradGuard no_grad;
  if (next_bucket_ < buckets_.size()) {
    // This was the end of a backward pass inside another one (reentrant autograd), whose own
    // gradients are still to come.
    if (torch::autograd::get_current_node()) return;
    launch_unready_buckets();
  }
  const auto reduced = wait_for_buckets();
  phase_ = Phase::Local;
  const auto status = status_.to(at::kCPU, at::kDouble);
  throw_problems(status[0].item<double>() > 0);

  const auto untouched = unused_everywhere(status);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].scatter(
        reduced[b], options_.gradient_as_bucket_view(), pick(untouched, buckets_[b]));
  }
  has_reduced_ = true;
  std::fill(used_.begin(), used_.end(), 0);
}

void Reducer::launch_unready_buckets() {
  std::vector<std::string> missing;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].ready) continue;
    slots_[i].ready = true;
    missing.push_back(parameters_[i].name);
  }
  if (!options_.find_unused_parameters()) {
    note_problem(
        {c10::str(
             "backward ended without gradients for ", missing.size(), " of ", parameters_.size(),
             " parameters (", join_names(missing), ")"),
         "If a forward pass may skip parameters, set find_unused_parameters(true); if not, check "
         "that the loss uses every output."});
  }
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);
}

std::vector<at::Tensor> Reducer::wait_for_buckets() {
  std::vector<at::Tensor> reduced;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto& bucket = buckets_[b];
    or_break_off(
        [&] {
          return c10::str(
              "reducing bucket ", b, " of ", buckets_.size(), " (", bucket.bytes(), " bytes: ",
              join_names(bucket.names()), ")");
        },
        [&] { reduced.push_back(wait_for(bucket)); });
  }
  or_break_off(
      [] { return std::string("exchanging the ranks' status"); },
      [&] {
        if (const auto work = std::exchange(status_work_, {})) work->wait();
      });
  return reduced;
}

at::Tensor Reducer::wait_for(Bucket& bucket) {
  if (const auto work = std::exchange(bucket.work, {})) work->wait();
  const auto future = std::exchange(bucket.future, {});
  if (!future) return bucket.gradients();
  future->waitAndThrow();
  auto result = future->value().toTensor();
  TORCH_CHECK(
      result.numel() == bucket.gradients().numel() &&
          result.scalar_type() == bucket.gradients().scalar_type(),
      "expected the communication hook to return ", bucket.gradients().numel(), " elements of ",
      bucket.gradients().scalar_type(), ", got ", result.numel(), " of ", result.scalar_type());
  return result;
}

std::vector<char> Reducer::unused_everywhere(const at::Tensor& status) const {
  std::vector<char> unused;
  if (!options_.find_unused_parameters()) return unused;
  const auto* words = status.const_data_ptr<double>();
  for (size_t i = 0; i < parameters_.size(); ++i) unused.push_back(words[1 + i] == 0);
  return unused;
}

std::vector<char> Reducer::pick(
    const std::vector<char>& by_parameter, const Bucket& bucket) const {
  std::vector<char> picked;
  if (by_parameter.empty()) return picked;
  for (const size_t index : bucket.indices()) picked.push_back(by_parameter[index]);
  return picked;
}

void Reducer::note_problem(Problem problem) {
  const std::lock_guard<std::mutex> lock(problems_mutex_);
  problems_.push_back(std::move(problem));
}

// A problem that came up here after the status was sent is known to this rank alone.
void Reducer::throw_problems(bool known_to_all) {
  if (!known_to_all && problems_.empty()) return;
  const auto mine = std::exchange(problems_, {});
  if (known_to_all) TORCH_CHECK(false, gather_problems(mine, group_));
  std::vector<std::vector<Problem>> by_rank(group_->getSize());
  by_rank[group_->getRank()] = mine;
  TORCH_CHECK(false, describe_problems(by_rank));
}

template <typename Describe, typename Step>
void Reducer::or_break_off(const Describe& doing, const Step& step) {
  try {
    step();
  } catch (const c10::Error& error) {
    break_off(doing(), error.what_without_backtrace());
  } catch (const std::exception& error) {
    break_off(doing(), error.what());
  }
}

void Reducer::break_off(const std::string& doing, const std::string& cause) {
  broken_because_ = c10::str(
      "Reducer: ", doing, " failed on rank ", group_->getRank(), " of ", group_->getSize(), ": ",
      cause, ". The ranks are out of step: end the job, or make a new process group and wrapper.");
  phase_ = Phase::Broken;
  TORCH_CHECK_WITH(DistBackendError, false, broken_because_);
}

}  // namespace ddp
