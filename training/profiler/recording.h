// LibTorch's profiler (Kineto), guarded by checks for the calls that crash it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "events.h"
#include "profiler/stacks/capture.h"

namespace torch::autograd::profiler {
struct ProfilerResult;
}

namespace ddp::profiling {

struct RecordingOptions {
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_stack = false;
};

/// A recording that ended.
class Trace {
 public:
  Trace(
      std::unique_ptr<torch::autograd::profiler::ProfilerResult> result,
      const RecordingOptions& options, std::string device);
  ~Trace();
  C10_DISABLE_COPY_AND_ASSIGN(Trace);

  RawEvents events() const;

  /// Writes the recording as JSON. LibTorch writes it only once; a second call copies the first
  /// file.
  ///
  /// \throws c10::Error
  void save(const std::string& path);

  const RecordingOptions& options() const { return options_; }
  const std::string& device() const { return device_; }

 private:
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> result_;
  RecordingOptions options_;
  std::string device_;    // "CUDA"; "" when no kernels were recorded
  std::string saved_to_;  // "" before the first save()
};

/// The only recording of the process. LibTorch's profiler crashes when it is prepared while it
/// records, also on another thread, and when a prepared recording is dropped.
class Recording {
 public:
  /// Prepares a recording.
  ///
  /// \throws c10::Error  another recording exists.
  explicit Recording(const RecordingOptions& options);
  /// Stops an unfinished recording. It cannot do so on another thread than start()'s; then no other
  /// recording may follow.
  ~Recording();
  C10_DISABLE_COPY_AND_ASSIGN(Recording);

  void start();
  /// Call it on start()'s thread.
  std::unique_ptr<Trace> stop();

 private:
  /// While one exists, constructing another throws.
  struct Claim {
    Claim();
    ~Claim();
    C10_DISABLE_COPY_AND_ASSIGN(Claim);
    bool is_permanent = false;  // until the process ends
  };
  enum class Stage { Prepared, Started, Stopped };
  using Frames = std::vector<std::vector<std::string>>;  // of each stack

  void enable();

  Claim claim_;
  RecordingOptions options_;
  const std::optional<c10::DeviceType> accelerator_;
  Stage stage_ = Stage::Prepared;
  std::thread::id thread_;
  std::unique_ptr<StackCapture> capture_;  // with_stack
  std::shared_ptr<Frames> frames_;         // filled by stop(), read by LibTorch
};

}  // namespace ddp::profiling
