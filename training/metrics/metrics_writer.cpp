#include "metrics/metrics_writer.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <ctime>
#include <map>
#include <mutex>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/system/start_thread.h>
#include <ddp/internal/text.h>

#include "metrics/event_file.h"
#include "metrics/json_lines.h"
#include "metrics/prometheus_port.h"
#include "metrics/prometheus_text.h"

namespace ddp {
namespace {

constexpr size_t kMostQueued = size_t{1} << 20;          // points
constexpr size_t kMostUnwrittenBytes = size_t{1} << 24;  // of a file
constexpr uint64_t kLongestLine = uint64_t{1} << 16;     // of JSON: a name has 1000 bytes at most
constexpr std::chrono::seconds kPatienceOfDestructor(30);

// A pipe that nobody reads and a limit of a file's size would end the program; so they are errors
// of write() in this thread.
void block_signals_of_writes() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

AppendedFile open_event_file(const std::string& folder) {
  static std::atomic<int> count{0};
  make_folders(folder);
  const auto now = std::time(nullptr);
  // TensorBoard reads files with "tfevents" in their names, in the order of the names.
  AppendedFile file(ddp::str(
      folder, "/events.out.tfevents.", now, '.', host_name(), '.', getpid(), '.', count++));
  file.append(first_event(static_cast<double>(now)));
  return file;
}

AppendedFile open_json_lines(const std::string& path) {
  make_folders(folder_above(path));
  AppendedFile file(path);
  const auto size = file.size();
  if (size == 0) return file;
  const InputFile before(path);
  std::string tail(std::min(size, kLongestLine), '\0');
  before.read(size - tail.size(), tail.data(), tail.size());
  const auto repair = repair_of_lines(tail);
  DDP_CHECK(
      repair.is_ours, path,
      ": expected a file of metrics, whose last line begins with {\"step\":, got another. Name "
      "another file, or end its last line.");
  if (repair.cut > 0) file.cut_to(size - repair.cut);
  if (repair.needs_end) file.append("\n");
  return file;
}

}  // namespace

/// A file that grows by points.
struct PointFile {
  AppendedFile file;
  std::string (*encode)(const MetricPoint& point);
  std::string unwritten = {};
  size_t lost = 0;  // points

  /// \return  why the file lacks points; "" if it has all.
  std::string write(const std::vector<MetricPoint>& points) {
    for (const auto& point : points) {
      const auto bytes = encode(point);
      if (unwritten.size() + bytes.size() <= kMostUnwrittenBytes) {
        unwritten += bytes;
      } else {
        ++lost;
      }
    }
    const auto problem = problem_of([&] {
      if (!unwritten.empty()) file.append(unwritten);
      unwritten.clear();
    });
    if (lost == 0) return problem;
    return ddp::str(
        problem, problem.empty() ? "" : " ", file.path(), " lacks ", lost,
        " values: more than memory is kept for, while it could not be written.");
  }
};

struct MetricsWriter::State {
  mutable std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::vector<MetricPoint> queued;
  size_t dropped = 0;    // points, because the queue was full
  uint64_t drains = 0;   // that were asked for
  uint64_t drained = 0;  // that were done
  bool closing = false;
  bool ended = false;
  std::string problem;

  // After the start they belong to the thread; `port` takes care of itself.
  std::vector<PointFile> files;
  std::map<std::string, MetricPoint> latest;
  std::string prometheus_file;
  std::unique_ptr<PrometheusPort> port;

  void run();
  std::string write(const std::vector<MetricPoint>& points);
  void write_prometheus(const std::vector<MetricPoint>& points);
};

void MetricsWriter::State::run() {
  block_signals_of_writes();
  std::unique_lock lock(mutex);
  while (!ended) {
    changed.wait(lock, [&] { return closing || drains > drained || !queued.empty(); });
    const auto points = std::exchange(queued, {});
    const auto drains_before = drains;
    const bool is_last = closing;
    lock.unlock();
    auto found = write(points);
    lock.lock();
    problem = std::move(found);
    drained = drains_before;
    ended = is_last;
    changed.notify_all();
  }
}

// Tries each place, whatever became of the others.
std::string MetricsWriter::State::write(const std::vector<MetricPoint>& points) {
  std::vector<std::string> problems;
  const auto add_problem_of = [&](auto&& body) {
    std::string found;
    const auto thrown = problem_of([&] { found = body(); });
    for (const auto& text : {found, thrown}) {
      if (!text.empty()) problems.push_back(text);
    }
  };
  for (auto& file : files) add_problem_of([&] { return file.write(points); });
  add_problem_of([&] {
    write_prometheus(points);
    return std::string();
  });
  return joined_by(" ", problems);
}

void MetricsWriter::State::write_prometheus(const std::vector<MetricPoint>& points) {
  if (!port && prometheus_file.empty()) return;
  for (const auto& point : points) latest[point.name] = point;
  const auto text = prometheus_text(latest);
  if (port) port->publish(text);
  if (prometheus_file.empty()) return;
  // The next values replace it.
  replace_file(
      prometheus_file, [&](OutputFile& file) { file.write(text.data(), text.size()); },
      WaitUntil::Written);
}

MetricsWriter::MetricsWriter(const MetricsTargets& targets) : state_(std::make_shared<State>()) {
  if (!targets.tensorboard.empty()) {
    state_->files.push_back({open_event_file(targets.tensorboard), scalar_event});
  }
  if (!targets.jsonl.empty()) {
    state_->files.push_back({open_json_lines(targets.jsonl), json_line});
  }
  if (!targets.prometheus_file.empty()) {
    state_->prometheus_file = absolute_path(targets.prometheus_file);
    make_folders(folder_above(state_->prometheus_file));
    state_->write_prometheus({});
  }
  if (targets.prometheus_port) {
    state_->port = std::make_unique<PrometheusPort>(*targets.prometheus_port);
  }
  thread_ = start_thread([state = state_] { state->run(); });
}

MetricsWriter::~MetricsWriter() { close(kPatienceOfDestructor); }

void MetricsWriter::push(std::vector<MetricPoint> points) {
  const std::lock_guard lock(state_->mutex);
  auto& queued = state_->queued;
  const auto taken = std::min(points.size(), kMostQueued - queued.size());
  const auto end = points.begin() + static_cast<std::ptrdiff_t>(taken);
  std::move(points.begin(), end, std::back_inserter(queued));
  state_->dropped += points.size() - taken;
  state_->changed.notify_all();
}

bool MetricsWriter::drain(std::chrono::milliseconds at_most) {
  std::unique_lock lock(state_->mutex);
  const auto own = ++state_->drains;
  state_->changed.notify_all();
  return state_->changed.wait_for(lock, at_most, [&] { return state_->drained >= own; });
}

std::string MetricsWriter::problem() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->dropped == 0) return state_->problem;
  return ddp::str(
      state_->dropped,
      " values are lost, because writing takes longer than training. Check the "
      "file system. ",
      state_->problem);
}

std::string MetricsWriter::close(std::chrono::milliseconds at_most) {
  if (!thread_.joinable()) return "";
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
    ended = state_->changed.wait_for(lock, at_most, [&] { return state_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
  if (ended) return problem();
  return ddp::str(
      "the last values may be missing: expected to write them within ", at_most.count() / 1000,
      " s, and could not. Check the file system.");
}

std::optional<int> MetricsWriter::port() const {
  if (!state_->port) return std::nullopt;
  return state_->port->port();
}

}  // namespace ddp
