#include "timeline.h"

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/core/jit_type.h>
#include <ddp/all_gather_strings.h>
#include <ddp/collectives.h>

#include "ddp_engine.h"
#include "result.h"

namespace ddp_bench {
namespace {

/// When buckets left and came back. Filled in from autograd's threads and the backend's.
class BucketLog {
 public:
  void launched(size_t index, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    buckets_[index] = {Clock::now(), Clock::now(), bytes};
  }
  void done(size_t index) {
    const std::lock_guard<std::mutex> lock(mutex_);
    buckets_[index].done = Clock::now();
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    buckets_.clear();
  }
  std::vector<Span> spans(Clock::time_point start) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Span> spans;
    for (const auto& [index, bucket] : buckets_) {
      spans.push_back(
          {"communication", "bucket " + std::to_string(index), milliseconds(start, bucket.launched),
           milliseconds(start, bucket.done), bucket.bytes});
    }
    return spans;
  }

 private:
  struct Bucket {
    Clock::time_point launched;
    Clock::time_point done;
    int64_t bytes;
  };

  mutable std::mutex mutex_;
  std::map<size_t, Bucket> buckets_;
};

// The reducer waits for what this returns, so a bucket's end is in the log when backward ends.
ddp::CommHook logged(ddp::CommHook hook, std::shared_ptr<BucketLog> log) {
  return [hook = std::move(hook), log = std::move(log)](ddp::GradBucket& bucket) {
    const size_t index = bucket.index();
    log->launched(index, static_cast<int64_t>(bucket.buffer().nbytes()));
    return hook(bucket)->then(
        [log, index](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          log->done(index);
          return done.value();
        },
        c10::TensorType::get());
  };
}

std::string span_json(const Span& span) {
  char numbers[128];
  std::snprintf(
      numbers, sizeof numbers, "\"start_ms\":%.4f,\"end_ms\":%.4f,\"bytes\":%lld", span.start_ms,
      span.end_ms, static_cast<long long>(span.bytes));
  return "{\"track\":" + json_string(span.track) + ",\"name\":" + json_string(span.name) + "," +
         numbers + "}";
}

std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ",") + item;
  return "[" + text + "]";
}

}  // namespace

std::vector<Span> record_step(
    Task task, const ddp::DistributedDataParallelOptions& options, int warmup) {
  const auto log = std::make_shared<BucketLog>();
  DdpEngine engine(std::move(task), options);
  engine.register_comm_hook(logged(ddp::hooks::all_reduce(options.process_group()), log));
  for (int step = 0; step < warmup; ++step) engine.step();
  log->clear();
  ddp::barrier(options.process_group());
  const auto times = engine.step();

  const auto at = [&](Clock::time_point time) { return milliseconds(times.start, time); };
  std::vector<Span> spans = {
      {"compute", "forward", 0, at(times.forward)},
      {"compute", "backward", at(times.forward), at(times.backward)},
      {"compute", "optimizer", at(times.backward), at(times.end)}};
  for (auto& span : log->spans(times.start)) spans.push_back(std::move(span));
  return spans;
}

std::string timeline_json(
    const std::string& model, const std::vector<Span>& spans, const ddp::ProcessGroup& group) {
  std::vector<std::string> mine;
  for (const auto& span : spans) mine.push_back(span_json(span));
  return "{\"model\":" + json_string(model) +
         ",\"mode\":\"ddp\",\"world\":" + std::to_string(group->getSize()) +
         ",\"ranks\":" + joined(ddp::all_gather_strings(joined(mine), group)) + "}";
}

}  // namespace ddp_bench
