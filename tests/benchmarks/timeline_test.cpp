#include "benchmarks/ddp_bench/timeline.h"

#include <algorithm>

#include <torch/torch.h>

#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::testing::Rank;
using ddp_bench::Span;

struct Recorded {
  std::vector<Span> spans;
  std::string json;
};

ddp::DistributedDataParallelOptions options_with(const Rank& self, double bucket_cap_mb) {
  return ddp::DistributedDataParallelOptions()
      .process_group(self.group)
      .bucket_cap_mb(bucket_cap_mb);
}

ddp_bench::Task task_of(const Rank& self) {
  return ddp_bench::make_task("small_params", 1, self.rank);
}

}  // namespace

TEST_CASE("a step's timeline has its parts and its buckets", "[benchmarks][ranks]") {
  const auto ranks = ddp::testing::run_ranks<Recorded>(2, [](const Rank& self) {
    Recorded recorded;
    recorded.spans = ddp_bench::record_step(task_of(self), options_with(self, 0.25), 3);
    recorded.json = ddp_bench::timeline_json("small_params", recorded.spans, self.group);
    return recorded;
  });
  for (const auto& [spans, json] : ranks) {
    REQUIRE(spans.size() == 7);
    CHECK(spans[0].name == "forward");
    CHECK(spans[1].name == "backward");
    CHECK(spans[2].name == "optimizer");
    int64_t bytes = 0;
    double launched = 0;
    for (const auto& span : spans) {
      CAPTURE(span.name);
      CHECK(span.start_ms <= span.end_ms);
      const bool bucket = span.track == "communication";
      CHECK(bucket == (span.bytes > 0));
      bytes += span.bytes;
      // Buckets are launched and finished within backward.
      if (bucket) CHECK(spans[1].start_ms <= span.start_ms);
      if (bucket) CHECK(span.end_ms <= spans[1].end_ms);
      if (bucket) CHECK(launched <= span.start_ms);
      if (bucket) launched = span.start_ms;
    }
    CHECK(bytes == 896000);
    CHECK(spans[0].end_ms == spans[1].start_ms);
    CHECK(spans[1].end_ms == spans[2].start_ms);
    CHECK(json == ranks[0].json);
    CHECK_THAT(
        json, ContainsText(R"({"model":"small_params","mode":"ddp","world":2,"ranks":[[{)") &&
                  ContainsText(R"({"track":"communication","name":"bucket 3","start_ms":)"));
    CHECK(std::count(json.begin(), json.end(), '{') == 1 + 2 * 7);
  }
}

// Tuning changes the buckets, which a wrapper with a communication hook refuses.
TEST_CASE("a step's timeline needs no hook", "[benchmarks][ranks]") {
  const auto ranks = ddp::testing::run_ranks<std::vector<Span>>(2, [](const Rank& self) {
    return ddp_bench::record_step(task_of(self), options_with(self, ddp::kTuneBucketCap), 10);
  });
  for (const auto& spans : ranks) {
    int64_t bytes = 0;
    for (const auto& span : spans) bytes += span.bytes;
    CHECK(bytes == 896000);
  }
}
