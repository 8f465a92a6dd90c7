#pragma once

#include <cstddef>

namespace ddp::testing {

struct World {
  const char* name;
  int (*main)(int argc, char** argv);
};

// CMake writes their definition: a world for each ddp_add_world.
extern const World kWorlds[];
extern const size_t kWorldCount;

}  // namespace ddp::testing
