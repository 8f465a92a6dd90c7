// The programs that tests start as ranks, in one: each world is a link to it, whose name says which
// world runs.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <unistd.h>

#include "worlds/worlds.h"

namespace {

/// Ends the process without static destructors: LibTorch's take a third of a second, in each of
/// hundreds of processes. The examples, which tests start as well, end in the usual way.
int leave(int code) {
#if !defined(__SANITIZE_ADDRESS__)  // whose report of leaks comes at the end
  std::fflush(nullptr);
  ::_exit(code);
#endif
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view path = argc > 0 ? argv[0] : "";
  const auto name = path.substr(path.rfind('/') + 1);
  for (size_t i = 0; i < ddp::testing::kWorldCount; ++i) {
    const auto& world = ddp::testing::kWorlds[i];
    if (name == world.name) return leave(world.main(argc, argv));
  }
  std::fprintf(
      stderr, "test_worlds: expected the name of a world as program's name, got '%.*s'. Worlds:\n",
      static_cast<int>(name.size()), name.data());
  for (size_t i = 0; i < ddp::testing::kWorldCount; ++i) {
    std::fprintf(stderr, "  %s\n", ddp::testing::kWorlds[i].name);
  }
  return EXIT_FAILURE;
}
