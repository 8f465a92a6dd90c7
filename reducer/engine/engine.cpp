// Between passes: construction, arming, and rebuilding the buckets.
#include "engine/engine.h"

#include <sys/resource.h>

#include <chrono>
#include <exception>
#include <fstream>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/env.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/inter_host_timer.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "gradients/sharded_gradients.h"
#include "stats/device_utilization.h"
#include "status/problem_report.h"

namespace ddp {
namespace {

// NCCL registers the memory of collectives in a graph with the network, unless this variable is 0.
// Expandable segments are no memory that every GPU can register.
bool registers_expandable_memory() {
  using Allocator = c10::CachingAllocator::AcceleratorAllocatorConfig;
  return Allocator::use_expandable_segments() &&
         c10::utils::get_env("NCCL_GRAPH_REGISTER").value_or("1") != "0";
}

bool tunes(const ReducerOptions& options) {
  return options.tune_bucket_cap() && options.bucket_cap_mb_list().empty();
}

// Called at construction: in the first backward pass one rank would fail while the others wait.
void check_dtypes(const std::vector<NamedParameter>& parameters, c10d::ProcessGroup& group) {
  if (group.getSize() == 1) return;
  constexpr auto kSum = c10d::ReduceOp::SUM;
  for (const auto& p : parameters) {
    const auto* served = capabilities_of(group, p.tensor.device()).reductions;
    DDP_CHECK_VALUE(
        served == nullptr || served->has(reduced_as(p.tensor.scalar_type(), kSum), kSum),
        "Reducer: expected parameters of a dtype that the backend adds up (",
        served->dtypes_of(kSum), "), got \"", p.name, "\" of ", p.tensor.scalar_type(),
        ". Train a copy of one of those dtypes, or put the name into parameters_to_ignore.");
    DDP_CHECK_VALUE(
        !p.expect_sparse || capabilities_of(group, p.tensor.device()).reduces_sparse,
        "Reducer: expected dense gradients over a backend without sparse all-reduce, ",
        group.getBackend(p.tensor.device().type())->getBackendName(), ", got \"", p.name,
        "\", whose are sparse. Make the Embedding with sparse(false), or use backend(\"gloo\").");
  }
}

// set_data() can leave a gradient of another shape, dtype or device, to which autograd cannot add.
void drop_unusable_gradient(const at::Tensor& parameter) {
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined()) return;
  const bool fits = grad.sizes() == parameter.sizes() && grad.dtype() == parameter.dtype() &&
                    grad.device() == parameter.device();
  if (!fits) grad.reset();
}

std::vector<NamedParameter> checked(
    std::vector<NamedParameter> parameters, const ReducerOptions& options,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      !parameters.empty(),
      "Reducer: expected at least one parameter, got none. Nothing needs to be reduced.");
  DDP_CHECK_VALUE(
      options.stats_every() >= 0,
      "Reducer: expected a number of steps, or 0 for none, for stats_every, got ",
      options.stats_every(), ".");
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        p.tensor.defined() && p.tensor.is_leaf() && p.tensor.requires_grad(),
        "Reducer: expected leaf tensors that require a gradient, got \"", p.name,
        p.tensor.defined() ? "\", which does not." : "\", which is undefined.");
    DDP_CHECK_VALUE(
        p.tensor.is_cpu() || !tunes(options),
        "Reducer: expected parameters on the CPU for bucket_cap_mb(kTuneBucketCap), got \"", p.name,
        "\" on ", p.tensor.device(),
        ". The host, which takes the times, runs ahead of a device: set a number of MiB.");
    DDP_CHECK_VALUE(
        !p.expect_sparse || !tunes(options),
        "Reducer: expected dense gradients for bucket_cap_mb(kTuneBucketCap), got \"", p.name,
        "\", whose are sparse and take another time in each step. Set a number of MiB.");
  }
  check_dtypes(parameters, group);
  for (const auto& p : parameters) drop_unusable_gradient(p.tensor);
  return parameters;
}

bool tracks_usage(const ReducerOptions& options) {
  return options.find_unused_parameters() || options.static_graph();
}

// Whether the status is all that the host would wait for at the end of a pass: the backend's
// collectives make the stream wait instead. In a group of one the status is always on the host.
bool can_run_ahead(c10d::ProcessGroup& group, const at::Tensor& parameter) {
  return group.getSize() > 1 && capabilities_of(group, parameter.device()).waits_on_stream;
}

// Where events take the times of a step. They compare moments of one device only.
std::optional<c10::Device> device_with_times(c10d::ProcessGroup& group, const BucketSet& buckets) {
  const auto device = buckets.parameters().front().tensor.device();
  if (device.is_cpu() || buckets.spans_devices()) return {};
  const bool on_stream = group.getSize() == 1 || capabilities_of(group, device).waits_on_stream;
  return on_stream ? std::optional(device) : std::nullopt;
}

// The most memory that this process has had. getrusage() also counts what its parent had where
// that started it by vfork(), as Python and posix_spawn() do.
int64_t peak_host_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib * 1024;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts KiB
}

// The most that tensors on `device` have had; 0 where its allocator does not count them.
int64_t peak_device_bytes(c10::Device device) {
  if (device.is_cpu()) return 0;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return 0;
  const auto stats = allocator->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return stats.allocated_bytes[kAll].peak;
}

// The time of a group's collectives between hosts, where it is known; null where it is not.
std::function<std::optional<double>()> inter_host_time(
    c10d::ProcessGroup& group, const BucketSet& buckets) {
  const auto backend = group.getBackend(buckets.parameters().front().tensor.device().type());
  if (const auto* timer = dynamic_cast<const InterHostTimer*>(backend.get())) {
    return [backend, timer] { return timer->inter_host_ms(); };
  }
  const auto local = c10::utils::get_env("LOCAL_WORLD_SIZE");
  if (group.getSize() == 1 || (local && local == c10::utils::get_env("WORLD_SIZE"))) {
    return [] { return 0.0; };
  }
  if (local != "1") return nullptr;
  // All communication is: the recorder takes no more than its time.
  return [] {
    return std::chrono::duration<double, std::milli>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
}

// Looks for the driver's libraries only where steps are sampled.
std::function<std::optional<int>()> utilization_of(c10::Device device, int64_t stats_every) {
  if (!device.is_cuda() || stats_every == 0) return nullptr;
  return device_utilization(device.index());
}

BucketSchedule make_schedule(
    const std::vector<NamedParameter>& parameters, const ReducerOptions& options, int ranks) {
  const bool skips = options.find_unused_parameters() && !options.static_graph();
  const bool tuned = tunes(options) && ranks > 1;
  const bool has_list = !options.bucket_cap_mb_list().empty();
  int passes = tuned ? static_cast<int>(BucketTuner::kPasses) : skips ? 0 : 1;
  if (passes > 0 && options.static_graph()) ++passes;  // the first pass only counts gradients
  return {
      extents_of(parameters),
      bucket_caps_bytes(options.bucket_cap_mb(), options.bucket_cap_mb_list()), skips,
      (skips && !tuned) || has_list, passes};
}

}  // namespace

Reducer::Engine::Engine(
    std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options,
    std::shared_ptr<GroupMonitor> monitor)
    : group_(std::move(group)),
      monitor_(monitor ? std::move(monitor) : monitor_of(group_)),
      buckets_(
          checked(parameters, options, *group_), group_, options.gradient_as_bucket_view(),
          options.lazy_bucket_allocation(),
          StatusAgreement::size(group_->getSize(), tracks_usage(options) ? parameters.size() : 0)),
      schedule_(make_schedule(buckets_.parameters(), options, group_->getSize())),
      hooks_(buckets_.parameters(), *this),
      early_failures_(
          [this] { return hooks_.accumulates(); },
          [this](const std::exception_ptr& cause) { on_early_failure(cause); }),
      usage_(UsagePolicy::make(options, buckets_.parameters(), hooks_.accumulators())),
      status_(
          group_->getRank(), group_->getSize(),
          usage_->tracks_usage() ? buckets_.parameters().size() : 0,
          !usage_->tracks_usage() && can_run_ahead(*group_, buckets_.parameters().front().tensor)),
      reduction_(make_all_reduction(group_, buckets_.parameters().front().tensor.device())),
      observers_{
          StepRecorder(
              group_->getRank(), options.stats_every(), tunes(options) ? BucketTuner::kPasses : 0,
              device_with_times(*group_, buckets_), inter_host_time(*group_, buckets_),
              utilization_of(device(), options.stats_every())),
          ComputeTimer(
              options.stats_every() > 0 && group_->getSize() > 1,
              device_with_times(*group_, buckets_))},
      unaveraged_(buckets_.parameters().size()),
      averaged_(buckets_.parameters(), options.gradient_as_bucket_view()),
      pass_(std::make_unique<BackwardPass>()),
      finds_nonfinite_(options.find_nonfinite()),
      settling_(std::make_shared<std::function<void()>>([this] { settle(); })) {
  if (runs_ahead()) monitor_->add_settling(settling_);
  observers_.tunes = tunes(options);
  if (tunes(options) && group_->getSize() > 1) {
    observers_.tuner = std::make_unique<BucketTuner>(group_, buckets_.parameters().size());
  }
  buckets_.build(schedule_.first_plan().buckets);
  choose_status_location();
  begin_pass(1);
}

Reducer::Engine::~Engine() { warn_of_last_pass(); }

// Warns of problems that no later pass can report.
void Reducer::Engine::warn_of_last_pass() const noexcept {
  if (!deferred_ || deferred_->problems.empty() || monitor_->aborted()) return;
  try {
    TORCH_WARN("The last reduced backward pass was wrong. ", describe_own_problems(*deferred_));
  } catch (const std::exception&) {
    // The user's warning handler threw; a destructor must not.
  }
}

std::string Reducer::Engine::describe_own_problems(const BackwardPass& pass) const {
  std::vector<std::vector<Problem>> by_rank(static_cast<size_t>(group_->getSize()));
  by_rank[static_cast<size_t>(group_->getRank())] = pass.problems;
  return describe_problems(by_rank, buckets_.parameters().size());
}

void Reducer::Engine::begin_pass(int64_t number) {
  schedule_.begin_pass();
  pass_->counts_only = usage_->is_counting();
  pass_->begin(number, buckets_, usage_->expected());
  if (!buckets_.spans_devices()) return;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    pass_->bucket(b).stream = current_stream_of(buckets_[b].device());
  }
}

void Reducer::Engine::choose_status_location() {
  if (group_->getSize() == 1) return status_.use_host_memory();
  const auto& last = buckets_.last();
  if (reduction_->carries_status(last)) {
    status_.use_bucket_tail(last.storage().tail());
  } else {
    status_.use_own_collective(device());
  }
}

void Reducer::Engine::check_reduction_may_change(const char* what) const {
  DDP_CHECK(
      !has_own_reduction_, what,
      ": a communication hook is registered already, or gradients are sharded. It can be set only "
      "once; compose hooks in one function instead.");
  DDP_CHECK(
      pass_->number() == 1 && phase_ != Phase::Reducing, what,
      ": expected to be called before the first backward pass.");
  DDP_CHECK(
      !observers_.tunes, what,
      ": expected buckets that stay the same once they are rebuilt, but bucket_cap_mb is "
      "kTuneBucketCap. Set a number of MiB.");
}

// A captured step runs on the host once and is replayed on the device: a decision of the host holds
// for every replay, and a wait of the host for the device would never end.
void Reducer::Engine::check_capture() const {
  if (!is_capturing(device())) return;
  DDP_CHECK(
      schedule_.is_final(),
      "DistributedDataParallel: expected a graph to be captured after the bucket order is final, "
      "got a capture of backward pass ",
      pass_->number(), " on ", monitor_->rank_text(),
      ". Run at least 3 steps on the capturing stream before.");
  DDP_CHECK(
      group_->getSize() == 1 || runs_ahead(),
      "DistributedDataParallel: expected a graph to be captured where no step makes the host wait "
      "for the device, got find_unused_parameters, static_graph or a backend other than NCCL on ",
      monitor_->rank_text(), ". Capture without these.");
  DDP_CHECK(
      group_->getSize() == 1 || !registers_expandable_memory(),
      "DistributedDataParallel: expected a graph to be captured in memory that NCCL can register, "
      "got expandable_segments in PYTORCH_CUDA_ALLOC_CONF on ",
      monitor_->rank_text(),
      ". Start every rank with NCCL_GRAPH_REGISTER=0, or leave expandable_segments out.");
}

void Reducer::Engine::register_comm_hook(CommHook hook) {
  DDP_CHECK_VALUE(hook, "register_comm_hook: expected a hook, got an empty function.");
  check_reduction_may_change("register_comm_hook");
  replace_all_reduce(make_hook_reduction(std::move(hook)));
}

void Reducer::Engine::reduce_in(at::ScalarType dtype) {
  check_reduction_may_change("a reduction in low precision");
  replace_all_reduce(make_reduction_in(dtype, group_));
}

void Reducer::Engine::replace_all_reduce(std::unique_ptr<BucketReduction> reduction) {
  has_own_reduction_ = true;
  reduction_ = std::move(reduction);
  buckets_.pack_all();
  choose_status_location();
  begin_pass(pass_->number());
}

std::shared_ptr<GradientShards> Reducer::Engine::shard_gradients() {
  check_reduction_may_change("sharded gradients");
  for (const auto& p : buckets_.parameters()) {
    DDP_CHECK_VALUE(
        !p.expect_sparse, "sharded gradients: expected dense gradients, got those of \"", p.name,
        "\", which are sparse. Make the Embedding with sparse(false).");
  }
  has_own_reduction_ = true;
  auto shards = std::make_shared<GradientShards>();
  // With one buffer a stream could not fill the next bucket while NCCL reduces this one. On the CPU
  // the host waits for the reduction anyway.
  const size_t buffers = can_run_ahead(*group_, buckets_.parameters().front().tensor) ? 2 : 1;
  buckets_.shard(schedule_.final_plan().buckets, shards, buffers);
  reduction_ = make_reduce_scatter(group_, device(), shards, buffers);
  choose_status_location();
  begin_pass(pass_->number());
  return shards;
}

void Reducer::Engine::on_bucket_reduced(OnBucketReduced act) {
  DDP_CHECK(
      !on_bucket_reduced_,
      "Reducer: expected one function to call with reduced gradients, got another.");
  on_bucket_reduced_ = std::move(act);
}

void Reducer::Engine::prepare_for_forward() {
  if (torch::autograd::get_current_node()) return;
  monitor_->check();
  check_finalized();
  check_capture();
  if (is_capturing(device())) {
    observers_.skip_step();
  } else {
    observers_.recorder.begin_forward(pass_->number());
    observers_.timer.begin_forward(pass_->number());
  }
  if (schedule_.rebuild_is_due()) rebuild_buckets();
}

void Reducer::Engine::prepare_for_backward(const ForwardOutcome& outcome) {
  monitor_->check();
  if (phase_ == Phase::Reducing) return;  // a forward inside a backward pass
  check_finalized();
  const bool alone = phase_ != Phase::Armed && phase_ != Phase::Selected;
  refresh_hooks();
  pass_->terms = outcome.terms;
  begin_pass(pass_->number());
  observers_.notify([&](PassObserver& o) { o.armed(buckets_.size()); });
  usage_->add_forward(outcome, alone, *pass_);
  hooks_.watch_outputs(outcome.outputs);
  if (monitor_->job_has_others()) early_failures_.expect(outcome.outputs);
  phase_ = outcome.only_through_outputs ? Phase::Selected : Phase::Armed;
}

void Reducer::Engine::prepare_for_local_backward() {
  if (phase_ == Phase::Reducing) return;
  check_finalized();
  refresh_hooks();
  if (phase_ != Phase::Selected) phase_ = Phase::Local;
}

// Called after the forward pass has made its part of the graph: from then on the accumulators of
// this backward pass are final.
void Reducer::Engine::refresh_hooks() {
  if (const auto reshaped = hooks_.reshaped()) {
    const auto& p = buckets_.parameters()[*reshaped];
    DDP_CHECK(
        false,
        "DistributedDataParallel: expected parameters of the shapes that they had when the module "
        "was wrapped, got \"",
        p.name, "\" of ", p.tensor.sizes(), " on ", monitor_->rank_text(),
        ". Call model->refresh() on every rank after a parameter changed its shape.");
  }
  if (hooks_.refresh()) usage_->accumulators_changed();
}

void Reducer::Engine::rebuild_buckets() {
  RECORD_FUNCTION("ddp::rebuild_buckets", c10::ArrayRef<const c10::IValue>());
  monitor_->abort_on_error(
      [] { return std::string("rebuilding the buckets"); },
      [&] {
        if (deferred_ && deferred_->status) {
          wait_for_pass_status(*deferred_);
          deferred_->works.clear();  // a work keeps the old buckets' memory alive
        }
        averaged_.keep_through(
            [&] { buckets_.build(schedule_.agreed_plan(pass_->number()).buckets); });
        choose_status_location();
      });
  begin_pass(pass_->number());
}

ReductionStats Reducer::Engine::stats() const {
  ReductionStats stats;
  stats.steps = observers_.recorder.steps();
  stats.rebuilds = schedule_.rebuilds();
  stats.rebuilt_at = schedule_.rebuilt_at();
  stats.bucket_bytes = buckets_.storage_bytes();
  stats.buckets = buckets_.indices();
  stats.backend = group_->getBackend(device().type())->getBackendName();
  stats.stragglers = find_stragglers({observers_.times.begin(), observers_.times.end()});
  stats.can_set_static_graph = usage_->is_alike_in_all_passes();
  stats.trained_per_second = observers_.rate.per_second();
  stats.peak_host_bytes = peak_host_bytes();
  stats.peak_device_bytes = peak_device_bytes(device());
  stats.tuning = observers_.tuned;
  if (stats.tuning) {
    stats.tuning->measured_ms = observers_.recorder.median_step_ms(/*after=*/stats.rebuilt_at);
  }
  return stats;
}

}  // namespace ddp
