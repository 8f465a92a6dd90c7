#include "plan/measured.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <ddp/internal/text.h>

#include "plan/cost.h"

namespace ddp::plan {
namespace {

/// A value of JSON, as far as reports have them.
struct Json {
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> members;

  const Json& at(const std::string& key) const {
    const auto found = members.find(key);
    if (found == members.end()) throw std::runtime_error("expected \"" + key + "\", got none");
    return found->second;
  }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json read() {
    auto value = read_value();
    if (next() != '\0') fail("the end");
    return value;
  }

 private:
  char next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (next() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "'");
  }
  [[noreturn]] void fail(const std::string& rule) {
    throw std::runtime_error(
        str("expected ", rule, " at byte ", at_, ", got '", text_.substr(at_, 20), "'"));
  }

  Json read_value() {
    Json value;
    if (take('{')) {
      while (!take('}')) {
        const auto key = read_text();
        expect(':');
        value.members[key] = read_value();
        if (next() != '}') expect(',');
      }
    } else if (take('[')) {
      while (!take(']')) {
        value.items.push_back(read_value());
        if (next() != ']') expect(',');
      }
    } else if (next() == '"') {
      value.text = read_text();
    } else {
      value.number = read_number();
    }
    return value;
  }

  std::string read_text() {
    expect('"');
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') ++at_;  // the texts that are used have no other escapes
      if (at_ < text_.size()) value += text_[at_++];
    }
    expect('"');
    return value;
  }

  double read_number() {
    next();
    const auto end = std::min(text_.find_first_not_of("+-.0123456789eE", at_), text_.size());
    InputText digits(text_.substr(at_, end - at_));
    double value = 0;
    if (!(digits >> value)) fail("a number");
    at_ = end;
    return value;
  }

  const std::string& text_;
  size_t at_ = 0;
};

MeasuredRank rank_of(const Json& json) {
  MeasuredRank rank;
  rank.rank = std::llround(json.at("rank").number);
  rank.compute_ms = json.at("compute_ms").number;
  for (const auto& [kind, bytes] : json.at("bytes_at_peak").members) {
    rank.bytes_at_peak[kind] = bytes.number;
  }
  for (const auto& calls : json.at("collectives").items) {
    rank.calls.push_back(
        {calls.at("axis").text, calls.at("kind").text, std::llround(calls.at("ranks").number),
         std::llround(calls.at("calls").number), calls.at("bytes").number});
  }
  return rank;
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
    const auto root = JsonReader(json).read();
    MeasuredJob job;
    job.world_size = std::llround(root.at("world_size").number);
    if (root.members.count("ranks") == 0) {
      job.ranks.push_back(rank_of(root));
    } else {
      for (const auto& rank : root.at("ranks").items) job.ranks.push_back(rank_of(rank));
    }
    if (job.ranks.empty()) throw std::runtime_error("expected a rank, got none");
    return job;
  } catch (const std::runtime_error& error) {
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
