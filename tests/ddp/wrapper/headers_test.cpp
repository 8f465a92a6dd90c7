// A second translation unit with the umbrella header: its definitions must not collide.
#include <ddp/ddp.h>

#include <string>

#include "support/catch.h"

TEST_CASE("the umbrella header declares every public name", "[pure][ddp]") {
  CHECK(std::string(DDP_VERSION) == "0.1.0");
  CHECK(
      ddp::DistributedSampler(4, ddp::DistributedSamplerOptions().num_replicas(2).rank(0))
          .epoch() == 0);
  CHECK_FALSE(ddp::is_initialized());
}
