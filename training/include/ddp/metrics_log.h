#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `Metrics`: where values are written to, one place at least. `average_every` must be
/// the same on every rank. Files and the port are rank 0's.
///
/// Example:
/// ```
/// ddp::Metrics metrics(
///     ddp::MetricsOptions().tensorboard("runs/a").jsonl("runs/a/metrics.jsonl").prometheus(9100));
/// ```
struct MetricsOptions {
  /// The folder of a new event file for TensorBoard; made when it is missing, with those above it.
  /// Default: none
  TORCH_ARG(std::string, tensorboard) = "";
  /// A file of JSON lines, continued where it exists. Default: none
  TORCH_ARG(std::string, jsonl) = "";
  /// The port of 127.0.0.1 that answers `GET /metrics` in Prometheus' text format; 0: any that is
  /// free, see prometheus_port(). Default: none
  TORCH_ARG(std::optional<int>, prometheus) = std::nullopt;
  /// A file with the same text, always whole: it is written under another name and renamed. For the
  /// textfile collector of Prometheus' node exporter, which reads names that end with .prom.
  /// Default: none
  TORCH_ARG(std::string, prometheus_file) = "";
  /// Calls of add() after which the ranks average what they have added, >= 1. Default: 0, as many
  /// as take about a second, up to 191
  TORCH_ARG(int64_t, average_every) = 0;
  /// The ranks that add values. Default: the default group
  TORCH_ARG(GroupArg, group) = {};
};

/// Values of a training, by name and step: averaged over the ranks, and written by rank 0 in the
/// background, for TensorBoard, as JSON lines, for Prometheus.
///
/// All ranks of the group construct it, and make the same calls in the same order: the same names
/// and steps, each with its own value. The mean of the ranks is written. Ranks that add something
/// else all throw, with the same text, once they average; a rank that adds fewer values than the
/// others is named by their timeout or by the group's other calls, as in every collective.
///
/// A file that cannot be written later than in the constructor never ends the training: add(),
/// flush() and the destructor warn once (TORCH_WARN, on rank 0), problem() has the text, and the
/// values stay in memory, up to 16 MiB a file, until a later write succeeds. A file never has a
/// part of a value.
///
/// Thread safety: none; use it on the training loop's thread. A process that a rank forked has no
/// part in it.
///
/// Example:
/// ```
/// ddp::Metrics metrics(ddp::MetricsOptions().tensorboard("runs/a"));
/// for (int64_t step = 0; step < steps; ++step) {
///   auto loss = train();
///   metrics.add("loss", loss, step);
/// }
/// metrics.flush();
/// ```
class DDP_API Metrics {
 public:
  /// Opens the files and the port on rank 0, and writes the first bytes.
  ///
  /// \throws c10::Error  on every rank, with the same text, if there is no place to write to, a
  ///         file cannot be made, the port is taken, or an option is out of its range or differs
  ///         between ranks; it names the file or the port.
  ///
  /// Collective: yes. Blocks: host.
  explicit Metrics(const MetricsOptions& options);
  /// Averages what add() has collected, and writes all; not what ranks have not averaged yet if an
  /// exception unwinds the stack, because other ranks may not come. Call flush() before the group
  /// is destroyed. Problems become a warning. Waits for a file system for at most half a minute, 2
  /// s while an exception unwinds the stack.
  ///
  /// Collective: yes, after add() without a flush(), unless an exception unwinds the stack.
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  /// Adds this rank's value.
  ///
  /// \param name  not empty, UTF-8 without control characters, at most 1000 bytes; "loss",
  ///        "train/accuracy". For Prometheus, characters that it has not become "_".
  /// \param value  may be NaN or infinite: the mean then is, too. TensorBoard has it as float32.
  /// \param step  >= 0; of any order.
  /// \throws c10::ValueError  a name or a step out of these. c10::Error  when the ranks average: as
  ///         average() of a map, also if orders differ. What they had added since they averaged
  ///         before is then lost.
  ///
  /// Collective: yes, in the calls in which the ranks average, which are the same on every rank;
  /// see MetricsOptions::average_every(). Blocks: host, in these calls. Cost: a copy of the name;
  /// in these calls an all-reduce of 2 KiB, on the CPU if the group has a backend for it, else on
  /// its current GPU.
  void add(const std::string& name, double value, int64_t step);
  /// The same of a tensor of one number, on any device. On a GPU it is copied there, on the current
  /// stream, so that it may change afterwards; the host waits for it only when the ranks average.
  ///
  /// \throws c10::ValueError  also for a tensor that is undefined, complex, or not of one element.
  void add(const std::string& name, const at::Tensor& value, int64_t step);

  /// Averages what was added, and waits on rank 0 until it is written, for at most a minute.
  ///
  /// \throws c10::Error  as add(); not for files.
  ///
  /// Collective: yes. Blocks: host.
  void flush();

  /// Why the files do not have all values that were averaged, as of the last write; "" where they
  /// have, and on other ranks than 0.
  std::string problem() const;
  /// The port that answers, on rank 0.
  std::optional<int> prometheus_port() const;

 private:
  struct Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
