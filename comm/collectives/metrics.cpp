#include <ddp/metrics.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/metrics.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "group/monitored_group.h"

namespace ddp {
namespace {

// Every call sends a message of the same size, whatever it asks for, because an all-reduce of
// different sizes would not end. The message begins with the bits of a hash of the request. Each
// bit's sum is 0 or the world size exactly if all ranks request the same, and every rank sees the
// same sums.
constexpr size_t kHashBits = 64;
constexpr size_t kFirstValues = kMetricsInOneMessage;
constexpr size_t kMessageSize = kHashBits + kFirstValues;  // doubles

/// A rank's request: the called function, and the keys of a map or the names of a list.
struct MetricsRequest {
  std::string subject;  // "average of a map"
  std::vector<std::string> keys = {};
  bool is_list = false;  // not sent: the subject says it, too

  std::string encoded() const {
    std::vector<std::string> texts{subject};
    texts.insert(texts.end(), keys.begin(), keys.end());
    return packed(texts);
  }

  static MetricsRequest decoded(const std::string& text) {
    auto keys = unpacked(text);
    auto subject = keys.front();
    keys.erase(keys.begin());
    return {std::move(subject), std::move(keys)};
  }

  bool has(const std::string& key) const { return contains(keys, key); }
};

// Says which ranks have which text: "a on rank 0 and b on ranks 1, 2". "" where all have the same.
std::string describe_difference(const std::vector<std::string>& by_rank) {
  std::map<std::string, std::vector<size_t>> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) ranks[by_rank[rank]].push_back(rank);
  if (ranks.size() == 1) return "";
  std::vector<std::string> parts;
  for (const auto& [text, having] : ranks) parts.push_back(text + " on " + ranks_text(having));
  return joined_by(" and ", parts);
}

std::string describe_subjects(const char* call, const std::vector<MetricsRequest>& by_rank) {
  std::vector<std::string> subjects;
  for (const auto& request : by_rank) subjects.push_back(request.subject);
  const auto difference = describe_difference(subjects);
  if (difference.empty()) return "";
  return ddp::str(
      call, ": expected the same call on every rank, got ", difference, " of ", by_rank.size(),
      ". Let every rank make the same calls in the same order.");
}

std::string describe_order(const char* call, const std::vector<MetricsRequest>& by_rank) {
  size_t longest = 0;
  for (const auto& request : by_rank) longest = std::max(longest, request.keys.size());
  for (size_t place = 0; place < longest; ++place) {
    std::vector<std::string> names;
    for (const auto& request : by_rank)
      names.push_back(place < request.keys.size() ? request.keys[place] : "none");
    const auto difference = describe_difference(names);
    if (difference.empty()) continue;
    return ddp::str(
        call, ": expected the same values in the same order on every rank, got ", difference,
        " of ", by_rank.size(), ". Let every rank make the same calls in the same order.");
  }
  return "";
}

std::string describe_keys(const char* call, const std::vector<MetricsRequest>& by_rank) {
  std::map<std::string, std::vector<size_t>> owners;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& key : by_rank[rank].keys) owners[key].push_back(rank);
  }
  const auto differs = [&](const auto& owner) { return owner.second.size() < by_rank.size(); };
  const auto first = find_if(owners, differs);
  if (first == owners.end()) return "";
  const auto others = std::count_if(std::next(first), owners.end(), differs);
  std::vector<size_t> lacking;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!by_rank[rank].has(first->first)) lacking.push_back(rank);
  }
  return ddp::str(
      call, ": expected the same keys on every rank, got \"", first->first, "\" on ",
      ranks_text(first->second), " and not on ", ranks_text(lacking), " of ", by_rank.size(),
      others > 0 ? ddp::str(" (", others, " more differ)") : "",
      ". Give every rank's map the same keys.");
}

// Every rank calls this, because all of them have seen the same sums.
void check_requests(const char* call, const MetricsRequest& request, const ProcessGroup& group) {
  agree(request.encoded(), group, call, [&](const std::vector<std::string>& texts) {
    std::vector<MetricsRequest> by_rank;
    for (const auto& text : texts) by_rank.push_back(MetricsRequest::decoded(text));
    const auto problem = describe_subjects(call, by_rank);
    if (!problem.empty()) return problem;
    return request.is_list ? describe_order(call, by_rank) : describe_keys(call, by_rank);
  });
}

std::vector<double> all_reduced(
    const char* call, const std::vector<double>& values, c10d::ProcessGroup& group) {
  auto host = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<double>());
  std::vector<at::Tensor> tensors{host.to(carrier_device(group))};
  monitored(call, group, tensors[0].device(), [&] {
    return StartedCall{{group.allreduce(tensors)}};
  })->wait();
  host = tensors[0].cpu();
  const auto* data = host.const_data_ptr<double>();
  return {data, data + values.size()};
}

std::vector<double> summed(
    const char* call, const MetricsRequest& request, const std::vector<double>& values,
    const ProcessGroup& group) {
  if (group->getSize() == 1) return values;
  const size_t at_once = std::min(values.size(), kFirstValues);
  const auto rest = values.begin() + static_cast<std::ptrdiff_t>(at_once);
  const uint64_t hash = fnv1a(request.encoded());
  std::vector<double> message(kMessageSize, 0.0);
  for (size_t bit = 0; bit < kHashBits; ++bit) message[bit] = (hash >> bit) & 1 ? 1 : 0;
  std::copy(values.begin(), rest, message.begin() + kHashBits);

  message = all_reduced(call, message, *group);
  const double size = group->getSize();
  const bool agreed = std::all_of(message.begin(), message.begin() + kHashBits, [&](double bit) {
    return bit == 0 || bit == size;
  });
  if (!agreed) check_requests(call, request, group);

  const auto first = message.begin() + kHashBits;
  std::vector<double> sums(first, first + static_cast<std::ptrdiff_t>(at_once));
  if (rest != values.end()) {
    const auto more = all_reduced(call, {rest, values.end()}, *group);
    sums.insert(sums.end(), more.begin(), more.end());
  }
  return sums;
}

double sum_of_value(const char* call, double value, const ProcessGroup& group) {
  return summed(call, {ddp::str(call, " of one value")}, {value}, group)[0];
}

std::map<std::string, double> sum_of_map(
    const char* call, std::map<std::string, double> values, const ProcessGroup& group) {
  MetricsRequest request{ddp::str(call, " of a map")};
  std::vector<double> own;
  for (const auto& [key, value] : values) {
    request.keys.push_back(key);
    own.push_back(value);
  }
  const auto sums = summed(call, request, own, group);
  auto next = sums.begin();
  for (auto& [key, value] : values) value = *next++;
  return values;
}

}  // namespace

std::vector<double> sum_in_order(
    const char* subject, const std::vector<std::string>& names, const std::vector<double>& values,
    const ProcessGroup& group) {
  return summed(subject, {ddp::str(subject, " of a list"), names, /*is_list=*/true}, values, group);
}

double sum(double value, const GroupArg& group) { return sum_of_value("sum", value, group.get()); }

std::map<std::string, double> sum(
    const std::map<std::string, double>& values, const GroupArg& group) {
  return sum_of_map("sum", values, group.get());
}

double average(double value, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  return sum_of_value("average", value, group) / group->getSize();
}

std::map<std::string, double> average(
    const std::map<std::string, double>& values, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  auto means = sum_of_map("average", values, group);
  for (auto& [key, value] : means) value /= group->getSize();
  return means;
}

}  // namespace ddp
