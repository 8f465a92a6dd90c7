// get_backend(): the name of what carries a group's tensors.
#include <ddp/process_group.h>

#include <string>
#include <vector>

#include <ddp/backend.h>
#include <ddp/internal/groups.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/backends/local_backend.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

ddp::ProcessGroup alone_over(const std::string& backend) {
  return ddp::make_process_group(ddp::ProcessGroupOptions()
                                     .backend(backend)
                                     .store(c10::make_intrusive<c10d::HashStore>())
                                     .rank(0)
                                     .world_size(1));
}

}  // namespace

TEST_CASE("get_backend names the backend in use, and each of several", "[comm]") {
  // Of GPUs, without one: it makes no tensors.
  ddp::register_backend(
      "toy_gpu", ddp::BackendDescription().devices({at::kCUDA}).make([](const auto& setup) {
        return ddp::backends::make_single_rank_backend("says_another", setup.timeout);
      }));
  CHECK(ddp::get_backend(alone_over("gloo")) == "gloo");
  CHECK(ddp::get_backend(alone_over("cpu:gloo,cuda:gloo")) == "gloo");
  CHECK(ddp::get_backend(alone_over("cuda:toy_gpu")) == "toy_gpu");
  CHECK(ddp::get_backend(alone_over("cuda:toy_gpu,cpu:gloo")) == "cpu:gloo,cuda:toy_gpu");
}

TEST_CASE("get_backend of the default group and of subgroups", "[comm][ranks]") {
  const auto before = ddp::replace_default_group(alone_over("gloo"));
  CHECK(ddp::get_backend() == "gloo");
  ddp::replace_default_group(before);
  for (const std::string backend : {"gloo", "shm"}) {
    const auto names = run_ranks<std::vector<std::string>>(3, over(backend), [](const Rank& self) {
      const auto pair = ddp::new_group({0, 2}, self.group);
      const auto single = ddp::split_group(self.rank, 0, self.group);
      return std::vector<std::string>{
          ddp::get_backend(self.group), ddp::get_backend(single),
          pair ? ddp::get_backend(pair) : error_of([&] { ddp::get_backend(pair); })};
    });
    for (const auto& of_rank : names) {
      CHECK(of_rank[0] == backend);
      CHECK(of_rank[1] == backend);
    }
    CHECK(names[2][2] == backend);
    CHECK_THAT(names[1][2], ContainsText("expected a group this process is a member of"));
  }
}
