#include "plan/measured.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <stdexcept>
#include <utility>

#include <ddp/internal/text.h>

#include "files/json_reader.h"
#include "plan/cost.h"

namespace ddp::plan {
namespace {

constexpr std::initializer_list<const char*> kMembersOfRank = {
    "rank", "compute_ms", "bytes_at_peak", "collectives"};

/// The members of an object that have been read.
class Members {
 public:
  /// Calls `read(name)` for each member, before its value.
  template <typename Read>
  Members(JsonReader& json, const Read& read) {
    json.object([&](const std::string& name) {
      names_.insert(name);
      read(name);
    });
  }

  void require(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (names_.count(name) == 0) {
        throw std::runtime_error(str("expected \"", name, "\", got none"));
      }
    }
  }

 private:
  std::set<std::string> names_;
};

MeasuredRank::Calls read_calls(JsonReader& json) {
  MeasuredRank::Calls calls;
  const Members members(json, [&](const std::string& name) {
    if (name == "axis") {
      calls.axis = json.text();
    } else if (name == "kind") {
      calls.kind = json.text();
    } else if (name == "ranks") {
      calls.ranks = json.number();
    } else if (name == "calls") {
      calls.calls = json.number();
    } else if (name == "bytes") {
      calls.bytes = json.real();
    } else {
      json.skip_value();
    }
  });
  members.require({"axis", "kind", "ranks", "calls", "bytes"});
  return calls;
}

void read_member_of_rank(JsonReader& json, const std::string& name, MeasuredRank& rank) {
  if (name == "rank") {
    rank.rank = json.number();
  } else if (name == "compute_ms") {
    rank.compute_ms = json.real();
  } else if (name == "bytes_at_peak") {
    json.object([&](const std::string& kind) { rank.bytes_at_peak[kind] = json.real(); });
  } else if (name == "collectives") {
    json.list('[', ']', [&] { rank.calls.push_back(read_calls(json)); });
  } else {
    json.skip_value();
  }
}

MeasuredRank read_rank(JsonReader& json) {
  MeasuredRank rank;
  const Members members(
      json, [&](const std::string& name) { read_member_of_rank(json, name, rank); });
  members.require(kMembersOfRank);
  return rank;
}

/// A report of several ranks has an object of each; that of one has the rank's members itself.
MeasuredJob read_job(JsonReader& json) {
  MeasuredJob job;
  MeasuredRank only;
  bool has_several = false;
  const Members members(json, [&](const std::string& name) {
    if (name == "world_size") {
      job.world_size = json.number();
    } else if (name == "ranks") {
      has_several = true;
      json.list('[', ']', [&] { job.ranks.push_back(read_rank(json)); });
    } else {
      read_member_of_rank(json, name, only);
    }
  });
  json.expect_end();
  members.require({"world_size"});
  if (!has_several) {
    members.require(kMembersOfRank);
    job.ranks.push_back(std::move(only));
  }
  if (job.ranks.empty()) throw std::runtime_error("expected a rank, got none");
  return job;
}

int64_t size_of_axis(const MeasuredJob& job, const std::string& axis) {
  for (const auto& rank : job.ranks) {
    for (const auto& calls : rank.calls) {
      if (calls.axis == axis) return calls.ranks;
    }
  }
  return 1;
}

/// Whether a step reduces over the axis of replicas, which a program without a mesh calls "world".
bool is_of_replicas(const MeasuredRank::Calls& calls) {
  return calls.axis == "dp" || calls.axis == "world";
}

Layout layout_of(const Task& task, const MeasuredJob& job) {
  Layout layout;
  layout.tp = size_of_axis(job, "tp");
  layout.pp = size_of_axis(job, "pp");
  layout.dp = std::max<int64_t>(1, job.world_size / layout.tp / layout.pp);
  layout.microbatches = std::max<int64_t>(1, task.microbatches);
  for (const auto& calls : job.ranks.front().calls) {
    const bool is_scattered = is_of_replicas(calls) && calls.kind == "reduce_scatter";
    layout.fsdp = layout.fsdp || is_scattered;
  }
  if (layout.dp * layout.tp * layout.pp != job.world_size || job.world_size != task.cluster.ranks) {
    throw std::runtime_error(
        str("expected a run of --ranks ", task.cluster.ranks, ", with axes dp, tp and pp, got ",
            layout.dp, " x ", layout.tp, " x ", layout.pp, " of ", job.world_size));
  }
  if (layout.pp > 1 && task.microbatches == 0) {
    throw std::runtime_error("expected --microbatches beside a run of a pipeline, got none");
  }
  return layout;
}

/// The bytes that one direction of a ring has of the calls: half of an all-reduce.
template <typename Predicate>
double bytes_of_directions(const MeasuredRank& rank, const Predicate& is_counted) {
  double bytes = 0;
  for (const auto& calls : rank.calls) {
    if (!is_counted(calls)) continue;
    if (calls.kind == "all_reduce") bytes += 2 * calls.bytes;
    if (calls.kind == "reduce_scatter") bytes += calls.bytes;
    if (calls.kind == "all_gather") bytes += calls.bytes * static_cast<double>(calls.ranks);
  }
  return bytes;
}

double kinds_at_peak(const MeasuredRank& rank, std::initializer_list<const char*> kinds) {
  double bytes = 0;
  for (const char* kind : kinds) {
    const auto found = rank.bytes_at_peak.find(kind);
    if (found != rank.bytes_at_peak.end()) bytes += found->second;
  }
  return bytes;
}

double ratio(double measured, double formula) {
  return measured > 0 && formula > 0 ? measured / formula : 1;
}

/// Solves the time of computation, which is work / rate + a part that no rate changes.
double rate_of(const Task& task, const Layout& layout, double seconds) {
  Task slow = task, fast = task;
  slow.cluster.cores = fast.cluster.cores = 0;
  slow.cluster.operations = 1e9;
  fast.cluster.operations = 2e9;
  const auto a = step_time(slow.model, slow.cluster, layout, task.batch);
  const auto b = step_time(fast.model, fast.cluster, layout, task.batch);
  const double work = 2e9 * (a.compute - b.compute);
  const double left = seconds - (a.compute - work / 1e9) - a.update;
  if (left <= 0) {
    throw std::runtime_error(
        str("expected more computation than --layer-us and --update-ns take, got ", 1e3 * seconds,
            " ms"));
  }
  return work / left;
}

}  // namespace

MeasuredJob parse_measured(const std::string& name, const std::string& json) {
  try {
    JsonReader reader(json);
    return read_job(reader);
  } catch (const std::exception& error) {
    throw std::runtime_error(
        str("--measured: ", name, ": ", error.what(),
            ". ddprun --pretend N --rank R --json writes it."));
  }
}

void fit(Task& task, const MeasuredJob& job) {
  const auto layout = layout_of(task, job);
  // The rank whose computation is longest, as that of a step is.
  const auto& rank = *std::max_element(
      job.ranks.begin(), job.ranks.end(),
      [](const auto& a, const auto& b) { return a.compute_ms < b.compute_ms; });
  task.cluster.operations = rate_of(task, layout, 1e-3 * rank.compute_ms);

  const auto stage = rank.rank / (layout.dp * layout.tp);
  const auto memory = memory_of_rank(task.model, layout, task.batch, stage);
  auto& corrections = task.model.corrections;
  corrections.state =
      ratio(kinds_at_peak(rank, {"parameters", "gradients", "optimizer"}), memory.state);
  corrections.activations = ratio(kinds_at_peak(rank, {"activations"}), memory.activations);
  corrections.beside = kinds_at_peak(rank, {"other", "buckets"});
  const auto bytes = directions_of_step(task.model, layout, task.batch, stage);
  corrections.tensor_bytes = ratio(
      bytes_of_directions(rank, [](const auto& calls) { return calls.axis == "tp"; }),
      bytes.tensor);
  corrections.data_bytes = ratio(bytes_of_directions(rank, is_of_replicas), bytes.data);
}

}  // namespace ddp::plan
