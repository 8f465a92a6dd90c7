#include "benchmarks/ddp_bench/runs/memory_sampler.h"

#include <sstream>

#include <torch/torch.h>

#include "benchmarks/ddp_bench/runs/memory_run.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

constexpr int64_t kMebibyte = 1 << 20;

// report_test.py has the same text for the Python peers.
constexpr const char* kRollup =
    "563e7c2bb000-7fffea352000 ---p 00000000 00:00 0                          [rollup]\n"
    "Rss:              686848 kB\n"
    "Pss:              531470 kB\n"
    "Pss_Dirty:        431470 kB\n"
    "Pss_Anon:         420000 kB\n"
    "Pss_File:          71470 kB\n"
    "Pss_Shmem:         40000 kB\n"
    "Swap:                  0 kB\n"
    "SwapPss:               0 kB\n";

}  // namespace

TEST_CASE("a rollup lists the memory of a process by kind", "[benchmarks][pure]") {
  const auto pss = ddp_bench::parse_pss(kRollup);
  REQUIRE(pss.has_value());
  CHECK(pss->anonymous == int64_t{420000} * 1024);
  CHECK(pss->shared == int64_t{40000} * 1024);
  CHECK(pss->file == int64_t{71470} * 1024);
  CHECK(pss->own() == int64_t{460000} * 1024);
}

TEST_CASE("a rollup without the kinds of memory is an error", "[benchmarks][pure][errors]") {
  CHECK_FALSE(ddp_bench::parse_pss("").has_value());
  CHECK_FALSE(ddp_bench::parse_pss("Rss: 12 kB\nPss: 12 kB\n").has_value());
}

TEST_CASE("the sampler keeps the peak of memory that was freed", "[benchmarks][pure]") {
  ddp_bench::MemorySampler idle;
  const int64_t before = idle.stop().own();
  ddp_bench::MemorySampler sampler;
  int64_t seen = 0;
  {
    // malloc maps blocks of this size, and returns them to the kernel.
    const auto block = at::ones({32 * kMebibyte});
    ddp_bench::MemorySampler meanwhile;
    seen = meanwhile.stop().own();
    // Wait until the first sampler's thread has seen it, too.
    while (sampler.peak().own() < seen - 8 * kMebibyte) std::this_thread::yield();
  }
  CHECK(seen - before > 120 * kMebibyte);
  CHECK(sampler.stop().own() - before > 120 * kMebibyte);
  CHECK(sampler.latest().own() - before < 60 * kMebibyte);
}

TEST_CASE("memory is measured for one mode, and rank 0 prints its line", "[benchmarks][ranks]") {
  const auto outputs = ddp::testing::run_ranks<std::string>(2, [](const auto& self) {
    ddp_bench::Options options;
    options.model = "small_params";
    options.modes = {"ddp"};
    options.warmup = 3;
    options.iters = 1;
    std::ostringstream out;
    ddp_bench::run_memory(options, self.group, out);
    return out.str();
  });
  CHECK_THAT(
      outputs[0], ContainsText(R"({"model":"small_params","mode":"ddp","backend":"gloo","world":2,)"
                               R"("bytes":896000,"peak_bytes":)"));
  CHECK(outputs[1].empty());
}
