#include "replicas/model_description.h"

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "precision/model_precision.h"

namespace ddp {
namespace {

std::string describe(const StateTensor& state) {
  const auto& t = state.tensor;
  std::string text = ddp::str(
      t.sizes(), " ", t.scalar_type(), ", strides ", t.strides(), ", on ", t.device().type());
  if (state.is_parameter) text += t.requires_grad() ? ", trained" : ", frozen";
  return text;
}

std::string describe_caps(const DistributedDataParallelOptions& options) {
  if (!options.bucket_cap_mb_list().empty()) return ddp::str(options.bucket_cap_mb_list());
  if (options.bucket_cap_mb() == kTuneBucketCap) return "tuned";
  return options.bucket_cap_mb() ? ddp::str(*options.bucket_cap_mb()) : "unset";
}

const char* yes_no(bool value) { return value ? "true" : "false"; }

constexpr const char* kError = "error";
constexpr const char* kComparison = "comparison";

std::string serialize(const Description& items) {
  std::string text;
  for (const auto& item : items) text += item.kind + '\t' + item.name + '\t' + item.value + '\n';
  return text;
}

Description deserialize(const std::string& text) {
  Description items;
  InputText lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find('\t');
    const auto second = line.find('\t', first + 1);
    items.push_back(
        {line.substr(0, first), line.substr(first + 1, second - first - 1),
         line.substr(second + 1)});
  }
  return items;
}

bool same(const DescribedItem& a, const DescribedItem& b) {
  return a.kind == b.kind && a.name == b.name && a.value == b.value;
}

size_t count_kind(const Description& items, const std::string& kind) {
  return count_if(items, [&](const DescribedItem& item) { return item.kind == kind; });
}

const DescribedItem* find(
    const Description& items, const std::string& kind, const std::string& name) {
  const auto at = find_if(
      items, [&](const DescribedItem& item) { return item.kind == kind && item.name == name; });
  return at == items.end() ? nullptr : &*at;
}

std::string quoted(const DescribedItem& item) { return item.kind + " \"" + item.name + '"'; }

// Names the first rank that compares something else than rank 0; "" where all compare the same.
std::string describe_different_calls(const std::vector<Description>& by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const auto& first = by_rank.front().front().name;
    const auto& other = by_rank[rank].front().name;
    if (other == first) continue;
    return ddp::str(
        "DistributedDataParallel: expected every rank to make the same call, but rank 0 compares "
        "the ranks' ",
        first, " and rank ", rank, " the ranks' ", other,
        ". Models are compared in construction and refresh(), replicas in check_replicas() and "
        "replicas_equal(), communication hooks in the first averaged backward pass.");
  }
  return {};
}

// The errors of the ranks that have one, one line each; "" where none has.
std::string describe_errors(const std::vector<Description>& by_rank) {
  std::string text;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& item : by_rank[rank]) {
      if (item.kind != kError) continue;
      text += ddp::str(
          text.empty() ? "" : "\n", "on rank ", rank, " of ", by_rank.size(), ": ", item.value);
    }
  }
  return text;
}

}  // namespace

std::string printable(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return name;
}

std::vector<size_t> ranks_unlike_first(const std::vector<Description>& by_rank) {
  std::vector<size_t> ranks;
  const auto text_of_first = serialize(by_rank.front());
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (serialize(by_rank[rank]) != text_of_first) ranks.push_back(rank);
  }
  return ranks;
}

// The descriptions are equal before item `i`, and differ there or one of them ends.
std::string describe_item_difference(const Description& a, const Description& b, size_t rank_b) {
  size_t i = 0;
  while (i < a.size() && i < b.size() && same(a[i], b[i])) ++i;
  const auto counts = [&](const std::string& kind) {
    return ddp::str(
        "rank 0 has ", count_kind(a, kind), " ", kind, "s and rank ", rank_b, " has ",
        count_kind(b, kind), ": ");
  };
  if (i < a.size() && !find(b, a[i].kind, a[i].name)) {
    return counts(a[i].kind) + quoted(a[i]) + " (" + a[i].value + ") is not on rank " +
           std::to_string(rank_b);
  }
  if (i < b.size() && !find(a, b[i].kind, b[i].name)) {
    return counts(b[i].kind) + quoted(b[i]) + " (" + b[i].value + ") is only on rank " +
           std::to_string(rank_b);
  }
  const auto* other = find(b, a[i].kind, a[i].name);
  if (other->value == a[i].value) {
    return ddp::str(
        quoted(a[i]), " comes in another place: where rank 0 has it, rank ", rank_b, " has ",
        quoted(b[i]));
  }
  return ddp::str(
      quoted(a[i]), " is ", a[i].value, " on rank 0 and ", other->value, " on rank ", rank_b);
}

std::vector<Description> gather_if_hashes_differ(
    const char* subject, const Description& mine, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor) {
  Description sent{{kComparison, subject, ""}};
  if (error) {
    sent.push_back({kError, "", printable(text_of(error))});
  } else {
    sent.insert(sent.end(), mine.begin(), mine.end());
  }
  const auto where = ddp::str(
      "DistributedDataParallel: comparing the ranks' ", subject,
      " (every rank has to construct and use its wrapper as the others do)");
  const auto text = serialize(sent);
  const auto digest = ddp::str(text.size(), ":", fnv1a(text));
  const auto digests = gather_strings(digest, group, where, &monitor);
  const bool equal =
      all_of(digests, [&](const std::string& other) { return other == digests.front(); });
  if (equal && error) std::rethrow_exception(error);
  if (equal) return {};
  std::vector<Description> by_rank;
  const auto make_problem = [&](const std::vector<std::string>& texts) {
    for (const auto& description : texts) by_rank.push_back(deserialize(description));
    return describe_different_calls(by_rank);
  };
  agree(text, group, where, make_problem, &monitor);
  for (auto& description : by_rank) description.erase(description.begin());
  const auto errors = describe_errors(by_rank);
  DDP_CHECK_VALUE(errors.empty(), errors);
  return by_rank;
}

Description describe_model(
    const std::vector<StateTensor>& state, const std::vector<NamedParameter>& trained,
    const DistributedDataParallelOptions& options, const ProcessGroup& group) {
  Description items;
  for (const auto& s : state) {
    auto text = describe(s);
    const auto is_same = [&](const NamedParameter& p) { return p.tensor.is_same(s.tensor); };
    const auto found = find_if(trained, is_same);
    if (found != trained.end() && found->expect_sparse) text += ", with sparse gradients";
    items.push_back({s.is_parameter ? "parameter" : "buffer", printable(s.name), std::move(text)});
  }
  const auto option = [&](const char* name, std::string value) {
    items.push_back({"option", name, std::move(value)});
  };
  option("bucket_cap_mb", describe_caps(options));
  option("broadcast_buffers", yes_no(options.broadcast_buffers()));
  const auto syncs = options.forward_sync_buffers();
  option("forward_sync_buffers", syncs ? yes_no(*syncs) : "unset");
  option("find_unused_parameters", yes_no(options.find_unused_parameters()));
  const auto every = options.check_replicas_every();
  option("check_replicas_every", every ? std::to_string(*every) : "unset");
  option("vote", yes_no(options.vote()));
  option("replay_every", std::to_string(options.replay_every()));
  if (options.replay_every() > 0) {
    // Kernels add up in another order with others.
    option("threads of an operation", std::to_string(at::get_num_threads()));
    option("instructions of the processor", at::get_cpu_capability());
  }
  option("check_inputs", yes_no(options.check_inputs()));
  option("find_nonfinite", yes_no(options.find_nonfinite()));
  option("static_graph", yes_no(options.static_graph()));
  option("mixed_precision", describe(options.mixed_precision()));
  constexpr const char* reductions[] = {"Mean", "Sum", "SampleWeighted"};
  option("reduction", reductions[static_cast<int>(options.reduction())]);
  if (!trained.empty()) {
    option(
        "buckets in the backend's memory (DDP_DISABLE_COMM_MEM)",
        yes_no(capabilities_of(*group, trained.front().tensor.device()).reduces_in_own_memory));
  }
  return items;
}

void check_are_same(const std::vector<Description>& by_rank) {
  if (by_rank.empty()) return;
  const auto different = ranks_unlike_first(by_rank);
  if (different.empty()) return;
  std::string others;
  if (different.size() > 1) {
    others = ddp::str(
        " (", different.size(), " of ", by_rank.size(),
        " ranks differ from rank 0: ", joined_by(" ", different), ")");
  }
  const auto first = different.front();
  DDP_CHECK(
      false, "DistributedDataParallel: expected every rank to wrap the same model, but ",
      describe_item_difference(by_rank.front(), by_rank[first], first), others,
      ". Build the model and its options from the same configuration on all ranks.");
}

}  // namespace ddp
