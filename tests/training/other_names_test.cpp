// Options that have the names of another class, and one line of text of every measurement.
#include <string>
#include <type_traits>
#include <vector>

#include <ddp/diloco.h>
#include <ddp/distributed_data_parallel_options.h>
#include <ddp/elastic.h>
#include <ddp/equal_batches.h>
#include <ddp/fully_sharded.h>
#include <ddp/model_averager.h>
#include <ddp/parameter_layout.h>
#include <ddp/pipeline_schedule.h>
#include <ddp/power_sgd.h>
#include <ddp/save_on_host.h>

#include "support/catch.h"

using Names = std::vector<std::string>;

TEST_CASE("an option has the names that wrappers give it", "[pure][training]") {
  CHECK(
      ddp::DistributedDataParallelOptions().ignored_parameters({"a"}).parameters_to_ignore() ==
      Names{"a"});
  CHECK(ddp::FullyShardedOptions().parameters_to_ignore({"a"}).ignored_parameters() == Names{"a"});

  const auto half = ddp::MixedPrecision().param_dtype(at::kHalf);
  const auto policy = ddp::FullyShardedOptions().mixed_precision(half).mp_policy();
  CHECK(policy.param_dtype() == at::kHalf);
  CHECK(policy.reduce_dtype() == at::kHalf);
  CHECK(!policy.buffer_dtype());
  const auto mixed = ddp::MixedPrecision(half).reduce_dtype(at::kFloat).buffer_dtype(at::kDouble);
  CHECK(ddp::MixedPrecisionPolicy(mixed).reduce_dtype() == at::kFloat);
  CHECK(ddp::MixedPrecisionPolicy(mixed).buffer_dtype() == at::kDouble);

  const auto shm = ddp::ProcessGroupOptions().backend("shm");
  CHECK(ddp::ElasticOptions().group(shm).group_options().backend() == "shm");
  CHECK(ddp::ElasticOptions().group_options(shm).group().backend() == "shm");
  CHECK(ddp::DiLoCoOptions().group(shm).group_options().backend() == "shm");
  CHECK(ddp::DiLoCoOptions().group().backend() == "gloo");
}

TEST_CASE("types have their older names", "[pure][training]") {
  STATIC_REQUIRE(std::is_same_v<ddp::Wire, ddp::DiLoCoWire>);
  STATIC_REQUIRE(std::is_same_v<ddp::Generation, ddp::ElasticGeneration>);
  STATIC_REQUIRE(std::is_same_v<ddp::Equal, ddp::EqualBatches>);
  STATIC_REQUIRE(std::is_same_v<ddp::Action, ddp::PipelineAction>);
  STATIC_REQUIRE(std::is_same_v<ddp::Box, ddp::TensorBox>);
}

TEST_CASE("every measurement has a line of text", "[pure][training]") {
  CHECK(ddp::summary(ddp::FullyShardedStats()).empty());
  ddp::FullyShardedStats sharded;
  sharded.units = {{"", 2, 1, 1 << 20}, {"head", 4, 2, 3 << 19}};
  CHECK(ddp::summary(sharded) == "2 units, 6 gathers, 3 reductions, 2.5 MiB");

  ddp::DiLoCoStats diloco;
  diloco.bytes_sent = 3 << 20;
  diloco.seconds_sent = 1.5;
  diloco.seconds_waited = 0.25;
  diloco.regions = {0, 2};
  CHECK(ddp::summary(diloco) == "2 regions, 3.0 MiB sent in 1.5 s, 0.25 s waited");

  ddp::hooks::CompressionStats compression;
  compression.numel_before = 2000000;
  compression.numel_after = 1000000;
  CHECK(summary(compression) == "2000000 elements compressed to 1000000, rate 2");

  ddp::save_on_host::Stats saved;
  saved.copied = 3;
  saved.bytes = 1 << 19;
  saved.kept = 4;
  CHECK(ddp::summary(saved) == "3 tensors copied, 0.5 MiB, 4 kept");
}
