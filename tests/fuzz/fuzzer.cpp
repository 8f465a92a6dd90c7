// libFuzzer's entry point. DDP_FUZZ_TARGET in the environment selects the target.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "targets.h"

namespace {

const ddp::fuzz::Target& chosen() {
  const char* name = std::getenv("DDP_FUZZ_TARGET");
  const auto& all = ddp::fuzz::targets();
  const auto at = std::find_if(
      all.begin(), all.end(), [&](const auto& target) { return name && target.name == name; });
  if (at == all.end()) {
    std::fprintf(stderr, "DDP_FUZZ_TARGET: expected the name of a target, got '%s'\n", name);
    std::exit(2);
  }
  return *at;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto& target = chosen();
  target.run({reinterpret_cast<const char*>(data), size});
  return 0;
}
