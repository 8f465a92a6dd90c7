#include "benchmarks/ddp_bench/result.h"

#include <cmath>

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
      R"("step_ms":12.3457,"step_ms_p10":11.0000,"step_ms_p90":13.0000,"compute_ms":10.0000,)"
      R"("comm_ms":4.0000,"overlap":0.4136,"bytes":67141632,"checksum":0.10000000000000001})");
}

TEST_CASE("what has no number is null", "[benchmarks][pure]") {
  auto result = example();
  result.bucket_cap_mb = {};
  result.checksum = std::nan("");
  CHECK_THAT(to_json(result), ContainsText("\"bucket_cap_mb\":null,"));
  CHECK_THAT(to_json(result), ContainsText("\"checksum\":null}"));
}

TEST_CASE("JSON strings are escaped", "[benchmarks][pure]") {
  CHECK(ddp_bench::json_string("a\"b\\c\nd") == R"("a\"b\\c\u000ad")");
}
