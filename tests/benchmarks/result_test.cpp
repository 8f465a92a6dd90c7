#include "benchmarks/ddp_bench/result.h"

#include "support/catch.h"

namespace {

ddp_bench::Result example() {
  ddp_bench::Result result;
  result.model = "mlp";
  result.mode = "ddp";
  result.backend = "gloo";
  result.world = 2;
  result.bucket_cap_mb = 2.5;
  result.step_ms = 12.34567;
  result.step_ms_p10 = 11;
  result.step_ms_p90 = 13;
  result.ratio = {{1.25, 1.5}, 1.375, {}};
  result.cpu = {20.5, {{1, 2, 3, 4, 5, 6}, 3.5, ddp_bench::Interval{1, 6}}};
  result.compute_ms = 10;
  result.comm_ms = 4;
  result.overlap = 0.41358;
  result.bytes = 67141632;
  result.checksum = 0.1;
  return result;
}

}  // namespace

TEST_CASE("a result is one line of JSON", "[benchmarks][pure]") {
  CHECK(
      to_json(example()) ==
      R"({"model":"mlp","mode":"ddp","backend":"gloo","world":2,"bucket_cap_mb":2.5,)"
      R"("step_ms":12.3457,"step_ms_p10":11.0000,"step_ms_p90":13.0000,)"
      R"("ratio":1.37500,"ratio_low":null,"ratio_high":null,"ratio_of_rounds":[1.25000,1.50000],)"
      R"("cpu_ms":20.5000,"cpu_ratio":3.50000,"cpu_ratio_low":1.00000,"cpu_ratio_high":6.00000,)"
      R"("cpu_ratio_of_rounds":[1.00000,2.00000,3.00000,4.00000,5.00000,6.00000],)"
      R"("compute_ms":10.0000,)"
      R"("comm_ms":4.0000,"overlap":0.4136,"bytes":67141632,"checksum":0.10000000000000001})");
}

TEST_CASE("memory is one line of JSON, with the peak first", "[benchmarks][pure]") {
  const ddp_bench::MemoryResult result = {"mlp", "ddp", "shm", 2, 67141632, {300, 40, 90}};
  CHECK(
      to_json(result) ==
      R"({"model":"mlp","mode":"ddp","backend":"shm","world":2,"bytes":67141632,)"
      R"("peak_bytes":340,"anonymous_bytes":300,"shared_bytes":40,"file_bytes":90})");
}

TEST_CASE("a value without a number is null", "[benchmarks][pure]") {
  auto result = example();
  result.bucket_cap_mb = {};
  result.checksum = std::nan("");
  CHECK_THAT(to_json(result), ContainsText("\"bucket_cap_mb\":null,"));
  CHECK_THAT(to_json(result), ContainsText("\"checksum\":null}"));
}
