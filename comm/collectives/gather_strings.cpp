#include <ddp/collectives.h>

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>

#include "group/monitored_group.h"

namespace ddp {
namespace {

// The length of a text travels with its first bytes: most texts are short, so one collective does.
constexpr size_t kFirstBytes = 1016;

// Every rank's `mine`, which has the same size on all.
std::vector<std::string> gather_equal(
    const std::string& mine, const ProcessGroup& group, WaitForWork wait) {
  auto bytes = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  std::vector<at::Tensor> inputs{bytes.to(carrier_device(*group))};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs[0].push_back(at::empty_like(inputs[0]));
  }
  wait(*group->allgather(outputs, inputs));

  std::vector<std::string> gathered;
  for (const auto& output : outputs[0]) {
    const auto host = output.cpu();
    gathered.emplace_back(static_cast<const char*>(host.const_data_ptr()), mine.size());
  }
  return gathered;
}

}  // namespace

std::vector<std::string> all_gather_strings(const std::string& text, const GroupArg& group) {
  return gather_strings(text, group.get(), "all_gather_strings");
}

std::vector<std::string> gather_strings(
    const std::string& text, const ProcessGroup& group, WaitForWork wait) {
  if (group->getSize() == 1) return {text};

  uint64_t length = text.size();
  std::string first(sizeof(length) + kFirstBytes, '\0');
  std::memcpy(first.data(), &length, sizeof(length));
  text.copy(first.data() + sizeof(length), kFirstBytes);

  std::vector<std::string> texts;
  uint64_t longest = 0;
  std::vector<uint64_t> lengths;
  for (const auto& frame : gather_equal(first, group, wait)) {
    std::memcpy(&length, frame.data(), sizeof(length));
    lengths.push_back(length);
    longest = std::max(longest, length);
    texts.push_back(frame.substr(sizeof(length), length));
  }
  if (longest <= kFirstBytes) return texts;

  auto rest = text.size() > kFirstBytes ? text.substr(kFirstBytes) : "";
  rest.resize(longest - kFirstBytes);
  const auto rests = gather_equal(rest, group, wait);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank] += rests[rank];
    texts[rank].resize(lengths[rank]);
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

size_t first_different_rank(const std::vector<std::string>& by_rank) {
  const auto is_other = [&](const std::string& text) { return text != by_rank.front(); };
  const auto found = std::find_if(by_rank.begin(), by_rank.end(), is_other);
  return found == by_rank.end() ? 0 : static_cast<size_t>(found - by_rank.begin());
}

}  // namespace ddp
