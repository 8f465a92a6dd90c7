#include <ddp/collectives.h>

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ddp/internal/carrier_device.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>

#include "group/monitored_group.h"

namespace ddp {
namespace {

std::vector<at::Tensor> gather_equal(
    const at::Tensor& mine, const ProcessGroup& group, WaitForWork wait) {
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) outputs[0].push_back(at::empty_like(mine));
  std::vector<at::Tensor> inputs{mine};
  wait(*group->allgather(outputs, inputs));
  return outputs[0];
}

}  // namespace

std::vector<std::string> all_gather_strings(const std::string& text, const GroupArg& group) {
  return gather_strings(text, group.get(), "all_gather_strings");
}

std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, WaitForWork wait) {
  if (group->getSize() == 1) return {text};
  const auto device = carrier_device(*group);

  std::vector<int64_t> lengths;
  const auto mine = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  for (const auto& length : gather_equal(mine, group, wait)) {
    lengths.push_back(length.item<int64_t>());
  }

  auto bytes = at::zeros({*std::max_element(lengths.begin(), lengths.end())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  if (bytes.numel() == 0) return std::vector<std::string>(lengths.size());

  std::vector<std::string> texts;
  for (const auto& gathered : gather_equal(bytes.to(device), group, wait)) {
    const auto host = gathered.cpu();
    texts.emplace_back(
        static_cast<const char*>(host.const_data_ptr()),
        static_cast<size_t>(lengths[texts.size()]));
  }
  return texts;
}

std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, const std::string& where,
    GroupMonitor* monitor) {
  const auto own = own_monitor_of(*group);
  if (!monitor) monitor = own.get();
  if (!monitor) return gather_strings(text, group, [](c10d::Work& work) { work.wait(); });
  const auto wait_point = [&] { return where; };
  std::vector<std::string> texts;
  monitor->abort_on_error(wait_point, [&] {
    texts = gather_strings(text, group, [&](c10d::Work& work) { monitor->wait(work, wait_point); });
  });
  return texts;
}

std::vector<std::string> agree(
    const std::string& text, const ProcessGroup& group, const std::string& where,
    ProblemOfRanks make_problem, GroupMonitor* monitor) {
  auto texts = gather_strings(text, group, where, monitor);
  const auto problem = make_problem(texts);
  if (problem.empty()) return texts;
  const auto own = own_monitor_of(*group);
  if (!monitor) monitor = own.get();
  if (monitor) monitor->throw_agreed(problem);
  throw readable_error<AgreedError>(DDP_HERE, problem);
}

}  // namespace ddp
