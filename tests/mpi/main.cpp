// usage: mpi_world CASE [BACKEND], one of those below. Prints "ok CASE" on every rank, or what is
// wrong.
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include <ATen/Parallel.h>

#include "mpi/world.h"

int main(int argc, char** argv) {
  using namespace mpi_world;
  at::set_num_threads(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // whole lines, for the launcher mixes those of ranks
  const std::string name = argc > 1 ? argv[1] : "";
  const std::string backend = argc > 2 ? argv[2] : "mpi";
  const std::map<std::string, std::function<void()>> cases{
      {"collectives", compare_collectives},
      {"rounding", compare_rounding},
      {"huge", huge},
      {"again", again},
      {"meet_for_others", meet_for_others},
      {"wrong_options", wrong_options},
      {"alone", alone},
      {"initialized_multiple", initialized_multiple},
      {"initialized_single", initialized_single},
      {"different", different},
      {"splits", splits},
      {"stopped", stopped},
      {"late", late},
      {"killed", killed},
      {"train_as_python", [&] { train_as_python(backend); }}};
  const auto found = cases.find(name);
  if (found == cases.end()) {
    std::fprintf(stderr, "usage: mpi_world CASE [BACKEND]. Cases:\n");
    for (const auto& [known, run] : cases) std::fprintf(stderr, "  %s\n", known.c_str());
    return 2;
  }
  try {
    found->second();
  } catch (const c10::Error& error) {
    std::printf("FAILED: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  // Rank 0's lines there are longer than what a launcher forwards at once: no other rank prints.
  if (name != "train_as_python") std::printf("ok %s\n", name.c_str());
  return 0;
}
