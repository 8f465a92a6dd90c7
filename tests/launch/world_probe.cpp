// One rank of a job: prints its place, and a sum that only all ranks together can compute.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <ATen/ops/full.h>

#include <ddp/collectives.h>
#include <ddp/process_group.h>

namespace world_probe {

int main(int /*argc*/, char** /*argv*/) try {
  ddp::init_process_group(
      ddp::ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(60)));
  auto sum = at::full({1}, static_cast<double>(ddp::get_rank()));
  ddp::all_reduce(sum);
  std::printf(
      "rank %d of %d sum %.0f local %d\n", ddp::get_rank(), ddp::get_world_size(),
      sum.item<double>(), ddp::get_local_rank());
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "world_probe: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace world_probe
