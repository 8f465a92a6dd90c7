#include "state_file.h"

#include <torch/serialize.h>

#include "../common/output_file.h"

namespace mnist {

void save(const Net& net, const std::string& path) {
  examples::write_file(path, [&](const std::string& part) { torch::save(net, part); });
}

}  // namespace mnist
