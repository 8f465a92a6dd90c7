#pragma once

#include <memory>

namespace ddp {

/// A device that captures work into a graph.
class GraphDevice {
 public:
  virtual ~GraphDevice() = default;

  /// \throws c10::Error  unless the current stream can capture, and is that of the first call.
  virtual void check_stream() = 0;
  /// Begins after all queued work has ended.
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  /// Ends a capture that cannot be completed.
  virtual void discard_capture() noexcept = 0;
  virtual void replay() = 0;
  /// Destroys the graph after its last replay has ended.
  virtual void reset() noexcept = 0;
};

std::unique_ptr<GraphDevice> make_cuda_graph_device();

}  // namespace ddp
