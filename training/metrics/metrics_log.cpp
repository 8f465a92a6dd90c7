#include <ddp/metrics_log.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/metrics.h>
#include <ddp/internal/owner_process.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <ddp/internal/utf8.h>

#include "metrics/average_pace.h"
#include "metrics/metrics_writer.h"

namespace ddp {

/// A value that this rank has added, and the ranks have not averaged.
struct AddedMetric {
  MetricPoint point;
  at::Tensor on_device;  // the value, where the point does not have it yet
};

namespace {

constexpr size_t kMostNameBytes = 1000;
constexpr std::chrono::seconds kPatienceOfFlush(60);
constexpr std::chrono::seconds kPatienceAtEnd(30);
constexpr std::chrono::seconds kPatienceOfUnwinding(2);

void check_options(const MetricsOptions& options) {
  DDP_CHECK_VALUE(
      !options.tensorboard().empty() || !options.jsonl().empty() ||
          !options.prometheus_file().empty() || options.prometheus(),
      "MetricsOptions: expected a place to write to, got none. Name one: tensorboard(folder), "
      "jsonl(file), prometheus(port), prometheus_file(file).");
  const int port = options.prometheus().value_or(0);
  DDP_CHECK_VALUE(
      0 <= port && port <= 65535,
      "MetricsOptions::prometheus: expected a port from 0 to 65535, got ", port,
      ". 0 takes any that is free.");
  DDP_CHECK_VALUE(
      options.average_every() >= 0,
      "MetricsOptions::average_every: expected a number of calls of at least 1, or 0, got ",
      options.average_every(), ". 0 lets the ranks average about once a second.");
}

void check_point(const std::string& name, int64_t step) {
  DDP_CHECK_VALUE(!name.empty(), "Metrics::add: expected a name, got \"\". Give the value one.");
  const bool has_controls = any_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7F; });
  DDP_CHECK_VALUE(
      !has_controls && name.size() <= kMostNameBytes && is_utf8(name),
      "Metrics::add: expected a name in UTF-8 of at most ", kMostNameBytes,
      " bytes and without control characters such as ends of lines, got ",
      json_text(is_utf8(name) ? name.substr(0, 100) : "other bytes"), ". Choose another name.");
  DDP_CHECK_VALUE(
      step >= 0, "Metrics::add: expected a step >= 0 of \"", name, "\", got ", step,
      ". Count from 0.");
}

void check_scalar(const std::string& name, const at::Tensor& value) {
  DDP_CHECK_VALUE(
      value.defined(), "Metrics::add: expected a tensor with the value of \"", name,
      "\", got an undefined one. Pass the loss, for example.");
  DDP_CHECK_VALUE(
      value.numel() == 1 && !value.is_complex() && !value.is_meta(),
      "Metrics::add: expected a tensor of one real number as the value of \"", name, "\", got ",
      value.toString(), " of ", value.numel(), " elements. Pass its mean() or its norm().");
}

double seconds_since_1970() {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return now.count();
}

// Copies the values of each device to the host at once.
void fetch_values(std::vector<AddedMetric>& added) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<AddedMetric*>> by_device;
  for (auto& metric : added) {
    if (!metric.on_device.defined()) continue;
    const auto device = metric.on_device.device();
    by_device[{device.type(), device.index()}].push_back(&metric);
  }
  for (const auto& [device, metrics] : by_device) {
    std::vector<at::Tensor> values;
    for (const auto* metric : metrics) values.push_back(metric->on_device);
    const auto on_host = at::stack(values).cpu();
    const auto* data = on_host.const_data_ptr<double>();
    for (auto* metric : metrics) metric->point.value = *data++;
  }
}

std::string problem_of_ranks(const std::vector<std::string>& by_rank) {
  std::vector<std::string> paces;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto texts = unpacked(by_rank[rank]);
    if (!texts[0].empty()) {
      return ddp::str("Metrics: rank ", rank, " of ", by_rank.size(), " cannot begin: ", texts[0]);
    }
    paces.push_back(texts[1]);
  }
  const auto other = first_different_rank(paces);
  if (other == 0) return "";
  return ddp::str(
      "MetricsOptions::average_every: expected the same number on every rank, got ", paces[0],
      " on rank 0 and ", paces[other], " on rank ", other, ". Give all ranks the same options.");
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const MetricsOptions& given) : options(given), pace(given.average_every()) {}

  void open();
  void add(AddedMetric metric);
  void average();
  void warn();

  const MetricsOptions options;
  const OwnerProcess owner;
  const int exceptions = std::uncaught_exceptions();
  AveragePace pace;
  std::chrono::steady_clock::time_point averaged_at = std::chrono::steady_clock::now();
  std::vector<AddedMetric> added;
  std::unique_ptr<MetricsWriter> writer;  // rank 0's
  bool has_warned = false;                // of the problem that the writer has
};

void Metrics::Impl::open() {
  const auto group = options.group().get();
  const auto problem = problem_of([&] {
    check_options(options);
    if (group->getRank() != 0 || is_pretended()) return;
    writer = std::make_unique<MetricsWriter>(MetricsTargets{
        options.tensorboard(), options.jsonl(), options.prometheus_file(), options.prometheus()});
  });
  agree(
      packed({problem, ddp::str(options.average_every())}), group, "Metrics: opening the files",
      problem_of_ranks);
}

void Metrics::Impl::add(AddedMetric metric) {
  owner.check("Metrics::add");
  added.push_back(std::move(metric));
  if (static_cast<int64_t>(added.size()) >= pace.adds()) average();
  warn();
}

// The first value is the time since the ranks averaged last: its mean sets their common pace.
void Metrics::Impl::average() {
  auto metrics = std::exchange(added, {});
  const auto group = options.group().get();
  fetch_values(metrics);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - averaged_at;
  std::vector<std::string> names{"the time"};
  std::vector<double> values{took.count()};
  for (const auto& metric : metrics) {
    const auto& point = metric.point;
    names.push_back(ddp::str('"', point.name, "\" of step ", point.step));
    values.push_back(point.value);
  }
  const auto sums = sum_in_order("Metrics", names, values, group);
  averaged_at = std::chrono::steady_clock::now();
  pace.set(static_cast<int64_t>(metrics.size()), sums[0] / group->getSize());
  if (!writer) return;
  std::vector<MetricPoint> points;
  for (size_t i = 0; i < metrics.size(); ++i) {
    points.push_back(std::move(metrics[i].point));
    points.back().value = sums[i + 1] / group->getSize();
  }
  writer->push(std::move(points));
}

void Metrics::Impl::warn() {
  if (!writer) return;
  const auto problem = writer->problem();
  const bool is_new = !problem.empty() && !has_warned;
  has_warned = !problem.empty();
  if (is_new) TORCH_WARN("Metrics: ", problem);
}

Metrics::Metrics(const MetricsOptions& options) : impl_(std::make_unique<Impl>(options)) {
  impl_->open();
}

Metrics::~Metrics() {
  if (!impl_->owner.is_this_one()) {
    (void)impl_.release();  // the threads are the owner's
    return;
  }
  const bool unwinds = std::uncaught_exceptions() > impl_->exceptions;
  std::vector<std::string> problems;
  if (!impl_->added.empty() && !unwinds) {
    const auto count = impl_->added.size();
    const auto problem = problem_of([&] { impl_->average(); });
    if (!problem.empty()) {
      problems.push_back(ddp::str("the last ", count, " values are not written: ", problem));
    }
  }
  if (impl_->writer) {
    const auto problem = impl_->writer->close(unwinds ? kPatienceOfUnwinding : kPatienceAtEnd);
    if (!problem.empty()) problems.push_back(problem);
  }
  if (!problems.empty()) TORCH_WARN("Metrics: ", joined_by(" ", problems));
}

void Metrics::add(const std::string& name, double value, int64_t step) {
  check_point(name, step);
  impl_->add({{name, step, seconds_since_1970(), value}, {}});
}

void Metrics::add(const std::string& name, const at::Tensor& value, int64_t step) {
  check_point(name, step);
  check_scalar(name, value);
  const at::NoGradGuard no_grad;
  if (value.is_cpu()) return add(name, value.item<double>(), step);
  auto copy = value.detach().reshape({}).to(at::kDouble, /*non_blocking=*/true, /*copy=*/true);
  impl_->add({{name, step, seconds_since_1970(), 0}, std::move(copy)});
}

void Metrics::flush() {
  impl_->owner.check("Metrics::flush");
  impl_->average();
  if (impl_->writer && !impl_->writer->drain(kPatienceOfFlush)) {
    TORCH_WARN(
        "Metrics: expected to write the values within ", kPatienceOfFlush.count(),
        " s, and still tries. Check the file system.");
  }
  impl_->warn();
}

std::string Metrics::problem() const { return impl_->writer ? impl_->writer->problem() : ""; }

std::optional<int> Metrics::prometheus_port() const {
  return impl_->writer ? impl_->writer->port() : std::nullopt;
}

}  // namespace ddp
