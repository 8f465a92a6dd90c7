#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "metrics/metric_point.h"

namespace ddp {

/// Where points are written to; "" and nothing: not there.
struct MetricsTargets {
  std::string tensorboard;  // a folder
  std::string jsonl;
  std::string prometheus_file;
  std::optional<int> prometheus_port;
};

/// Writes points on a thread of its own. No failure of a file reaches the caller's thread but by
/// problem(): the points that are not in a file stay in memory, up to 16 MiB a file, and the next
/// write tries again.
///
/// Thread safety: one thread constructs, calls and destroys it.
class MetricsWriter {
 public:
  /// Makes the folders that are missing, opens the files and the port.
  ///
  /// \throws std::exception  with a text that names the file or the port.
  explicit MetricsWriter(const MetricsTargets& targets);
  /// As close(), for half a minute.
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void push(std::vector<MetricPoint> points);
  /// Waits until all points before have been written, or could not be.
  ///
  /// \return false: not in that time.
  bool drain(std::chrono::milliseconds at_most);
  /// Why the files do not have all points; "" where they have. Forgotten once they have them.
  std::string problem() const;
  /// Writes all points and ends the thread; after `at_most` abandons it.
  ///
  /// \return  as problem().
  std::string close(std::chrono::milliseconds at_most);

  /// The port that answers, if one does.
  std::optional<int> port() const;

 private:
  struct State;

  std::shared_ptr<State> state_;  // the thread may outlive this
  std::thread thread_;
};

}  // namespace ddp
