#include "recording.h"

#include <atomic>
#include <exception>
#include <set>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/process_group.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "profiler/stacks/frames.h"
#include "trace_file.h"

namespace torch::autograd::profiler {
// Declared here because its header includes others that need Kineto's own include folder.
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}  // namespace torch::autograd::profiler

namespace ddp::profiling {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::atomic<bool> is_recording{false};

kineto::ProfilerConfig config_of(const RecordingOptions& options) {
  return kineto::ProfilerConfig(
      kineto::ProfilerState::KINETO, options.record_shapes, options.profile_memory,
      options.with_stack);
}

/// The accelerator of this process whose kernels Kineto records; nothing without one.
std::optional<c10::DeviceType> recorded_accelerator() {
  if (at::hasCUDA()) return at::kCUDA;
  if (at::hasXPU()) return at::kXPU;
  return std::nullopt;
}

std::set<ActivityType> activities(std::optional<c10::DeviceType> accelerator) {
  std::set<ActivityType> kinds = {ActivityType::CPU};
  if (accelerator == at::kCUDA) kinds.insert(ActivityType::CUDA);
  if (accelerator == at::kXPU) kinds.insert(ActivityType::XPU);
  return kinds;
}

bool is_annotation(const kineto::KinetoEvent& event) {
  const auto kind = static_cast<libkineto::ActivityType>(event.activityType());
  return kind == libkineto::ActivityType::USER_ANNOTATION ||
         kind == libkineto::ActivityType::GPU_USER_ANNOTATION;
}

RawEvent raw_event(const kineto::KinetoEvent& event) {
  RawEvent raw;
  raw.name = event.name();
  raw.start_ns = static_cast<int64_t>(event.startNs());
  raw.end_ns = static_cast<int64_t>(event.endNs());
  raw.start_thread = event.startThreadId();
  raw.end_thread = event.endThreadId();
  raw.correlation_id = event.correlationId();
  raw.linked_correlation_id = event.linkedCorrelationId();
  raw.bytes = event.nBytes();
  raw.device_type = event.deviceType();
  raw.is_async = event.isAsync();
  raw.is_hidden = event.isHiddenEvent();
  raw.is_user_annotation = is_annotation(event);
  raw.is_backward = event.scope() == static_cast<uint8_t>(at::RecordScope::BACKWARD_FUNCTION);
  if (event.hasShapes()) raw.shapes = event.shapes().vec();
  raw.sequence_number = event.sequenceNr();
  raw.forward_thread = event.fwdThreadId();
  raw.stack = event.stack().vec();
  return raw;
}

// Adds the metadata that TensorBoard's plugin and others read from the file.
void add_metadata(const RecordingOptions& options) {
  if (options.profile_memory) kineto::addMetadataJson("profile_memory", "1");
  if (options.record_shapes) kineto::addMetadataJson("record_shapes", "1");
  if (options.with_stack) kineto::addMetadataJson("with_stack", "1");
  if (!is_initialized()) return;
  kineto::addMetadataJson(
      "distributedInfo",
      ddp::str(R"({"rank": )", get_rank(), R"(, "world_size": )", get_world_size(), "}"));
}

}  // namespace

Trace::Trace(
    std::unique_ptr<kineto::ProfilerResult> result, const RecordingOptions& options,
    std::string device)
    : result_(std::move(result)), options_(options), device_(std::move(device)) {}

Trace::~Trace() = default;

RawEvents Trace::events() const {
  RawEvents recorded;
  recorded.start_ns = static_cast<int64_t>(result_->trace_start_ns());
  for (const auto& event : result_->events()) recorded.events.push_back(raw_event(event));
  return recorded;
}

void Trace::save(const std::string& path) {
  check_trace_path(path);
  if (!saved_to_.empty()) return copy_trace(saved_to_, path);
  saved_to_ = path;
  write_trace(path, [this](const std::string& part) { result_->save(part); });
}

Recording::Claim::Claim() {
  // Rejects a recording by LibTorch's own profiler on this thread; LibTorch throws for one on
  // another.
  DDP_CHECK(
      !torch::profiler::impl::profilerEnabled() && !is_recording.exchange(true),
      "Profiler: expected no other recording in this process, got one that goes on. Stop it first, "
      "or give the two schedules whose warmup and active steps are not at the same time.");
}

Recording::Claim::~Claim() {
  if (!is_permanent) is_recording = false;
}

Recording::Recording(const RecordingOptions& options)
    : options_(options), accelerator_(recorded_accelerator()) {
  kineto::prepareProfiler(config_of(options_), activities(accelerator_));
  if (!options_.with_stack) return;
  // Already in warmup: unwinding takes a hundred times as long the first time at a place.
  capture_ = std::make_unique<StackCapture>();
  frames_ = std::make_shared<Frames>();
}

Recording::~Recording() {
  if (stage_ == Stage::Stopped) return;
  if (stage_ == Stage::Started && thread_ != std::this_thread::get_id()) {
    claim_.is_permanent = true;
    TORCH_WARN(
        "Profiler: expected to be destroyed on the thread that it records, was destroyed on "
        "another. The recording goes on, and no other can begin in this process.");
    return;
  }
  try {
    if (stage_ == Stage::Prepared) start();
    kineto::disableProfiler();
  } catch (const std::exception& error) {
    TORCH_WARN("Profiler: the recording could not be stopped: ", text_of(error));
  }
}

void Recording::enable() {
  if (!options_.with_stack) {
    kineto::enableProfiler(config_of(options_), activities(accelerator_));
    return;
  }
  // LibTorch itself records frames of TorchScript, which are within those of C++.
  const auto add_frames = [all = frames_](
                              int64_t number, std::vector<std::string>& stack,
                              std::vector<std::string>& /*modules*/) {
    if (number < 0 || number >= static_cast<int64_t>(all->size())) return;
    const auto& frames = (*all)[static_cast<size_t>(number)];
    stack.insert(stack.end(), frames.begin(), frames.end());
  };
  kineto::enableProfilerWithEventPostProcess(
      config_of(options_), activities(accelerator_), add_frames);
}

void Recording::start() {
  enable();
  thread_ = std::this_thread::get_id();
  stage_ = Stage::Started;
  add_metadata(options_);
}

std::unique_ptr<Trace> Recording::stop() {
  // Running kernels belong to the recording.
  if (accelerator_) at::accelerator::synchronizeDevice(at::accelerator::getDeviceIndex());
  if (capture_) *frames_ = frames_of(capture_->stacks());
  capture_.reset();
  stage_ = Stage::Stopped;
  const auto device = accelerator_ ? c10::DeviceTypeName(*accelerator_) : "";
  return std::make_unique<Trace>(kineto::disableProfiler(), options_, device);
}

}  // namespace ddp::profiling
