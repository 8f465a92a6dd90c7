// LibTorch's profiler (Kineto), with checks in front of what crashes it.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "events.h"

namespace torch::autograd::profiler {
struct ProfilerResult;
}

namespace ddp::profiling {

struct RecordingOptions {
  bool record_shapes = false;
  bool profile_memory = false;
};

/// A recording that ended.
class Trace {
 public:
  Trace(
      std::unique_ptr<torch::autograd::profiler::ProfilerResult> result,
      const RecordingOptions& options, std::string device);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  RawEvents events() const;

  /// Writes it as JSON. LibTorch does so once; a second call copies the first one's file.
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

/// The one recording of the process. LibTorch's profiler crashes when it is prepared while it
/// records, also on another thread, and when a prepared recording is dropped.
class Recording {
 public:
  /// Prepares.
  ///
  /// \throws c10::Error  another recording goes on.
  explicit Recording(const RecordingOptions& options);
  /// Ends it, if it was not; on another thread than start()'s it cannot, and no other may follow.
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void start();
  /// On start()'s thread.
  std::unique_ptr<Trace> stop();

 private:
  /// While one lives, there is no other.
  struct Claim {
    Claim();
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    bool is_kept = false;  // for the rest of the process
  };
  enum class Stage { Prepared, Started, Stopped };

  Claim claim_;
  RecordingOptions options_;
  bool on_cuda_;
  Stage stage_ = Stage::Prepared;
  std::thread::id thread_;
};

}  // namespace ddp::profiling
