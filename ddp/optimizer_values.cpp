#include "optimizer_values.h"

#include <algorithm>
#include <functional>
#include <sstream>
#include <unordered_map>

#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

namespace ddp {
namespace {

// What `write` writes, by key in an order that does not depend on the rank.
std::vector<OptimizerValue> written_by(
    const std::function<void(torch::serialize::OutputArchive&)>& write, const std::string& owner) {
  std::stringstream bytes;
  torch::serialize::OutputArchive out;
  write(out);
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  auto keys = in.keys();
  std::sort(keys.begin(), keys.end());
  std::vector<OptimizerValue> values;
  for (const auto& key : keys) {
    c10::IValue value;
    if (in.try_read(key, value)) values.push_back({c10::str(key, " of ", owner), value});
  }
  return values;
}

void append(std::vector<OptimizerValue>& values, std::vector<OptimizerValue> more) {
  std::move(more.begin(), more.end(), std::back_inserter(values));
}

}  // namespace

std::vector<OptimizerValue> optimizer_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::vector<OptimizerValue> options, state;
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto group = c10::str("parameter group ", g);
    append(options, written_by([&](auto& out) { groups[g].options().serialize(out); }, group));
    const auto& parameters = groups[g].params();
    for (size_t p = 0; p < parameters.size(); ++p) {
      auto* const key = parameters[p].unsafeGetTensorImpl();
      const auto found = optimizer.state().find(key);
      if (found == optimizer.state().end()) continue;
      const auto name = names.find(key);
      append(
          state,
          written_by(
              [&](auto& out) { found->second->serialize(out); },
              name != names.end() ? name->second : c10::str("parameter ", p, " of ", group)));
    }
  }
  append(options, std::move(state));
  return options;
}

}  // namespace ddp
