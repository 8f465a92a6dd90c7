#include <ddp/prefetch.h>

#include <dlfcn.h>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>

#include "ordered_workers.h"

namespace ddp::detail {
namespace {

c10::Device checked_device(c10::Device device) {
  const bool known = c10::impl::hasDeviceGuardImpl(device.type());
  const int count = known ? c10::impl::VirtualGuardImpl(device.type()).deviceCount() : 0;
  DDP_CHECK_VALUE(
      device.index() < count && count > 0, "PrefetchOptions: expected device to be there, got ",
      device, " and ", count, " devices of type ", c10::DeviceTypeName(device.type(), true),
      ". Choose another, or leave device unset to keep batches where they are.");
  if (device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// MPS has no streams to choose from.
bool has_streams(c10::Device device) {
  return at::accelerator::isAcceleratorExcluded(device.type(), at::kMPS);
}

// A thread that calls into OpenMP gets a thread team of its own, as large as the loop's: with a few
// workers the loop would wait for a core. at::set_num_threads(1) would apply to the whole process,
// so this calls OpenMP and MKL directly, whichever of them LibTorch has loaded.
void use_one_compute_thread() {
  thread_local bool done = false;
  if (std::exchange(done, true)) return;
  at::get_num_threads();  // its first call sets a number: make it before the calls below
  for (const char* name : {"omp_set_num_threads", "MKL_Set_Num_Threads_Local"}) {
    if (void* const set = dlsym(RTLD_DEFAULT, name)) reinterpret_cast<void (*)(int)>(set)(1);
  }
}

// Copies on the current stream. LibTorch keeps the pinned memory until the device has read it.
at::Tensor copy_through_pinned_memory(const at::Tensor& t, c10::Device device) {
  if (!t.is_cpu()) return t.to(device);
  // A tensor with gaps would be copied to dense memory that is not pinned.
  const auto dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
  return dense.pin_memory().to(device, /*non_blocking=*/true);
}

}  // namespace

PrefetchSetup prepare_prefetch(
    const PrefetchOptions& options, bool inner_is_null, const BatchFacts& facts) {
  DDP_CHECK_VALUE(
      !inner_is_null,
      "make_prefetch_loader: expected a loader to draw batches from, got a null pointer. Pass what "
      "torch::data::make_data_loader returned.");
  DDP_CHECK_VALUE(
      options.workers() >= 1, "PrefetchOptions: expected workers >= 1, got ", options.workers(),
      ". To prepare batches on the loop's own thread, loop over the inner loader.");
  const int64_t depth = options.depth().value_or(options.workers() + 1);
  DDP_CHECK_VALUE(
      depth >= 1, "PrefetchOptions: expected depth >= 1, got ", depth,
      ". Pass the number of batches to prepare ahead of the loop, or leave it unset.");
  DDP_CHECK_VALUE(
      !options.on_consumed() || facts.can_count,
      "PrefetchOptions: expected batches whose samples can be counted for on_consumed, got ",
      facts.inner_type,
      ". Declare `size_t batch_size(const T& batch)` beside that type, or leave on_consumed "
      "unset.");

  PrefetchSetup setup;
  setup.workers = static_cast<size_t>(options.workers());
  setup.depth = static_cast<size_t>(depth);
  setup.on_consumed = options.on_consumed();
  if (!options.device()) return setup;
  DDP_CHECK_VALUE(
      facts.can_move,
      "PrefetchOptions: expected batches whose tensors can be found, to copy them to ",
      *options.device(), ", got ", facts.loop_type,
      ". Declare `T move_tensors(const T& batch, const ddp::TensorMove& to)` beside that type, or "
      "leave device unset and copy in the loop.");
  setup.device = checked_device(*options.device());
  if (has_streams(*setup.device)) {
    const c10::impl::VirtualGuardImpl backend(setup.device->type());
    setup.side_stream = backend.getStreamFromGlobalPool(*setup.device);
  }
  return setup;
}

struct PrefetchPass::Running {
  Running(const PrefetchSetup& setup, Draw draw);

  const PrefetchSetup& setup;
  const at::ThreadLocalState loop_thread_state;
  std::optional<size_t> samples_in_loop;
  OrderedWorkers workers;  // last: its threads use the other members
};

// Sets, on a worker, the thread-local state of the thread that began the pass, and the side stream.
class PrefetchPass::WorkerGuard {
 public:
  explicit WorkerGuard(const Running& pass)
      : state_(pass.loop_thread_state), stream_(pass.setup.side_stream) {
    use_one_compute_thread();
  }

 private:
  at::ThreadLocalStateGuard state_;
  c10::OptionalStreamGuard stream_;
};

// Runs a job, and copies its tensors to the device.
class PrefetchPass::TransferWork final : public Work {
 public:
  TransferWork(std::unique_ptr<PrefetchJob> job, const Running& pass)
      : job_(std::move(job)), pass_(pass) {}

  void run() override {
    const WorkerGuard guard(pass_);
    if (!device()) return job_->run(nullptr);
    const auto to_device = [this](const at::Tensor& t) { return move(t); };
    const TensorMove move_one(to_device);
    job_->run(&move_one);
    if (side_stream()) {
      copied_.emplace(side_stream()->device_type());
      copied_->record(*side_stream());
    }
  }

  // Called on the loop's thread.
  std::unique_ptr<PrefetchJob> release_job() {
    if (copied_) {
      const auto stream = current_stream_of(*device());
      copied_->block(stream);
      // The memory belongs to the side stream, which must not reuse it before the loop's stream is
      // done.
      for (const auto& t : on_device_) t.record_stream(stream);
    }
    return std::move(job_);
  }

 private:
  const std::optional<c10::Device>& device() const { return pass_.setup.device; }
  const std::optional<c10::Stream>& side_stream() const { return pass_.setup.side_stream; }

  at::Tensor move(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!side_stream()) return t.to(*device());
    DDP_CHECK(
        t.layout() == at::kStrided, "PrefetchLoader: expected strided tensors to copy to ",
        *device(), ", got one with layout ", t.layout(),
        ". Leave device unset and copy the batch in the loop.");
    on_device_.push_back(copy_through_pinned_memory(t, *device()));
    return on_device_.back();
  }

  std::unique_ptr<PrefetchJob> job_;
  const Running& pass_;
  std::vector<at::Tensor> on_device_;
  std::optional<c10::Event> copied_;
};

PrefetchPass::Running::Running(const PrefetchSetup& setup_of_loader, Draw draw)
    : setup(setup_of_loader),
      workers(
          setup.workers, setup.depth, [this, draw = std::move(draw)]() -> std::unique_ptr<Work> {
            const WorkerGuard guard(*this);
            auto job = draw();
            return job ? std::make_unique<TransferWork>(std::move(job), *this) : nullptr;
          }) {}

PrefetchPass::PrefetchPass(const PrefetchSetup& setup, Draw draw)
    : running_(std::make_unique<Running>(setup, std::move(draw))) {}

PrefetchPass::~PrefetchPass() = default;

std::unique_ptr<PrefetchJob> PrefetchPass::next() {
  DDP_CHECK(
      running_,
      "PrefetchLoader: expected an iterator of the pass that is on, got one of a pass that a later "
      "begin(), or the end of the loader, has ended. Use what the last begin() returned.");
  if (const auto samples = std::exchange(running_->samples_in_loop, std::nullopt)) {
    if (running_->setup.on_consumed) running_->setup.on_consumed(*samples);
  }
  const auto work = running_->workers.next();
  if (!work) return nullptr;
  auto job = static_cast<TransferWork&>(*work).release_job();
  running_->samples_in_loop = job->samples();
  return job;
}

void PrefetchPass::close() { running_.reset(); }

}  // namespace ddp::detail
