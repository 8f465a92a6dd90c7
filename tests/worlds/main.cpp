// The programs that tests start as ranks, in one: each world is a link to it, whose name says which
// world runs.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "worlds/worlds.h"

int main(int argc, char** argv) {
  const std::string_view path = argc > 0 ? argv[0] : "";
  const auto name = path.substr(path.rfind('/') + 1);
  for (size_t i = 0; i < ddp::testing::kWorldCount; ++i) {
    const auto& world = ddp::testing::kWorlds[i];
    if (name == world.name) return world.main(argc, argv);
  }
  std::fprintf(
      stderr, "test_worlds: expected the name of a world as program's name, got '%.*s'. Worlds:\n",
      static_cast<int>(name.size()), name.data());
  for (size_t i = 0; i < ddp::testing::kWorldCount; ++i) {
    std::fprintf(stderr, "  %s\n", ddp::testing::kWorlds[i].name);
  }
  return EXIT_FAILURE;
}
