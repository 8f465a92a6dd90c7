#include <ddp/internal/reducer.h>

#include <utility>

#include "engine/engine.h"

namespace ddp {

Reducer::Reducer(
    std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
    std::shared_ptr<GroupMonitor> monitor)
    : engine_(std::make_unique<Engine>(
          std::move(parameters), std::move(group), options, std::move(monitor))) {}

Reducer::~Reducer() = default;

void Reducer::prepare_for_forward() { engine_->prepare_for_forward(); }

void Reducer::prepare_for_backward(const ForwardOutcome& outcome) {
  engine_->prepare_for_backward(outcome);
}

void Reducer::prepare_for_local_backward() { engine_->prepare_for_local_backward(); }

bool Reducer::is_reducing() const { return engine_->is_reducing(); }

void Reducer::require_manual_finalization(bool required) {
  engine_->require_manual_finalization(required);
}

void Reducer::finalize_backward() { engine_->finalize_backward(); }

bool Reducer::should_finalize_after_backward() const {
  return engine_->should_finalize_after_backward();
}

bool Reducer::awaits_finalization() const { return engine_->awaits_finalization(); }

void Reducer::join_backward(const PassTerms& terms) { engine_->join_backward(terms); }

bool Reducer::has_averages() const { return engine_->has_averages(); }

bool Reducer::accumulates() const { return engine_->accumulates(); }

void Reducer::report_problem(std::string what, std::string remedy) {
  engine_->status().report({std::move(what), std::move(remedy), {}, ""});
}

bool Reducer::clear_usage_of_zeroed_grads() {
  return engine_->usage().clear_usage_of_zeroed_grads();
}

void Reducer::register_comm_hook(CommHook hook) { engine_->register_comm_hook(std::move(hook)); }

void Reducer::reduce_in(at::ScalarType dtype) { engine_->reduce_in(dtype); }

std::shared_ptr<GradientShards> Reducer::shard_gradients() { return engine_->shard_gradients(); }

void Reducer::explain_missing(ExplainMissing explain) {
  engine_->usage().explain_missing(std::move(explain));
}

void Reducer::on_bucket_reduced(OnBucketReduced act) { engine_->on_bucket_reduced(std::move(act)); }

void Reducer::settle() { engine_->settle(); }

void Reducer::set_companion(PassCompanion& companion) { engine_->set_companion(companion); }

const std::vector<NamedParameter>& Reducer::parameters() const {
  return engine_->buckets().parameters();
}

GroupMonitor& Reducer::monitor() const { return engine_->monitor(); }

std::vector<std::vector<size_t>> Reducer::bucket_indices() const {
  return engine_->buckets().indices();
}

BucketOrder Reducer::bucket_order() const { return engine_->schedule().agreed_order(); }

void Reducer::set_bucket_order(const BucketOrder& order) { engine_->set_bucket_order(order); }

void Reducer::count_trained(int64_t samples) { engine_->count_trained(samples); }

ReductionStats Reducer::stats() const { return engine_->stats(); }

bool Reducer::has_rebuilt_buckets() const { return engine_->schedule().has_rebuilt(); }

}  // namespace ddp
