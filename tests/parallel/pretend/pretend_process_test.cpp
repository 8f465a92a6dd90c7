// Lists of calls (DDP_CALLS_DIR): of real jobs, and of the same ranks where the others do not
// exist.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

#include "support/processes.h"
#include "support/taken_port.h"
#include "support/temporary_folder.h"

using namespace ddp::testing;

namespace {

using Fields = std::vector<std::string>;

Fields fields_of(const std::string& line) {
  Fields fields;
  std::istringstream text(line);
  for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
  fields.resize(std::max<size_t>(fields.size(), 10));
  return fields;
}

/// A rank's list.
struct List {
  std::vector<std::string> groups;
  std::vector<std::vector<std::string>> steps{1};  // the calls before the first, and of each
  std::map<std::string, int64_t> peaks, at_peak;   // of each kind of memory
  int64_t peak = 0, process = 0;
  size_t waits = 0;
  std::string end;

  std::vector<std::string> sorted_step(size_t step) const {
    auto calls = steps.at(step);
    std::sort(calls.begin(), calls.end());
    return calls;
  }
};

List read_list(const std::string& folder, int rank) {
  List list;
  const auto path = folder + "/rank_" + std::to_string(rank) + ".calls";
  for (const auto& line : lines_of(read_bytes(path))) {
    const auto f = fields_of(line);
    if (f[0] == "group") list.groups.push_back(f[1] + ' ' + f[2] + ' ' + f[3] + ' ' + f[4]);
    if (f[0] == "step") list.steps.emplace_back();
    if (f[0] == "wait") ++list.waits;
    if (f[0] == "peak") list.peak = std::stoll(f[1]);
    if (f[0] == "process") list.process = std::stoll(f[1]);
    if (f[0] == "end") list.end = f[2];
    if (f[0] == "memory") {
      list.peaks[f[1]] = std::stoll(f[2]);
      list.at_peak[f[1]] = std::stoll(f[3]);
    }
    if (f[0] != "call") continue;
    list.steps.back().push_back(
        f[3] + ' ' + f[4] + ' ' + f[5] + ' ' + f[6] + ' ' + f[7] + " (" + f[8] + ')');
  }
  return list;
}

/// Ranks of a job of `size` that are all there is of it.
void pretend(
    const std::string& folder, int size, const std::vector<int>& present, const Fields& args) {
  std::string list;
  for (const int rank : present) list += (list.empty() ? "" : ",") + std::to_string(rank);
  const auto port = std::to_string(free_port());
  std::deque<Process> ranks;
  for (const int rank : present) {
    ProcessOptions options;
    const auto local = std::to_string(rank % 8);
    options.environment = {
        "RANK=" + std::to_string(rank),
        "WORLD_SIZE=" + std::to_string(size),
        "LOCAL_RANK=" + local,
        "LOCAL_WORLD_SIZE=" + std::to_string(std::min(size, 8)),
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=" + port,
        "OMP_NUM_THREADS=1",
        "DDP_PRETEND=" + list,
        "DDP_CALLS_DIR=" + folder};
    Fields command{PRETEND_WORLD_PROGRAM};
    command.insert(command.end(), args.begin(), args.end());
    ranks.emplace_back(command, options);
  }
  for (auto& rank : ranks) {
    const auto ended = rank.wait();
    INFO(ended.out << ended.err);
    CHECK(ended.code == 0);
  }
}

void run_for_real(const std::string& folder, int size, const std::string& axes) {
  ProcessOptions options;
  options.environment = {"DDP_CALLS_DIR=" + folder};
  const auto job = run_job(size, {PRETEND_WORLD_PROGRAM, axes}, options);
  INFO(job.output);
  REQUIRE(job.code == 0);
}

int64_t sum_of(const std::map<std::string, int64_t>& kinds) {
  int64_t sum = 0;
  for (const auto& [_, bytes] : kinds) sum += bytes;
  return sum;
}

/// \param in_order  not where threads send and receive beside the program.
void check_alike(const List& real, const List& pretended, bool in_order) {
  CHECK(real.end == "ok");
  CHECK(pretended.end == "ok");
  CHECK(pretended.groups == real.groups);
  REQUIRE(pretended.steps.size() == real.steps.size());
  CHECK(real.steps.size() == 1 + 4);  // and what is before the first
  for (size_t step = 0; step < real.steps.size(); ++step) {
    CAPTURE(step);
    CHECK(pretended.sorted_step(step) == real.sorted_step(step));
    if (in_order) CHECK(pretended.steps[step] == real.steps[step]);
  }
  CHECK(real.steps.back().size() > 0);
  if (in_order) CHECK(pretended.waits == real.waits);
  CHECK(real.waits > 0);
  CAPTURE(real.peak, pretended.peak);
  CHECK(real.peak > 0);
  CHECK(
      std::abs(static_cast<double>(pretended.peak - real.peak)) <
      0.05 * static_cast<double>(real.peak));
  CHECK(sum_of(pretended.at_peak) == pretended.peak);
  CHECK(pretended.process > pretended.peak);
  for (const auto& [kind, bytes] : real.peaks) {
    CAPTURE(kind, bytes, pretended.peaks.at(kind));
    const auto apart = std::abs(pretended.peaks.at(kind) - bytes);
    CHECK(static_cast<double>(apart) <= 0.05 * static_cast<double>(real.peak));
  }
}

/// Compares ranks of a real job with the same ranks that are pretended, `present` at a time.
void compare(const std::string& axes, int size, const std::vector<std::vector<int>>& present) {
  const TemporaryFolder real, pretended;
  run_for_real(real.path(), size, axes);
  for (const auto& ranks : present) {
    pretend(pretended.path(), size, ranks, {axes});
    for (const int rank : ranks) {
      CAPTURE(axes, rank);
      check_alike(
          read_list(real.path(), rank), read_list(pretended.path(), rank),
          axes != "pp" && axes != "3d");
    }
  }
}

}  // namespace

TEST_CASE("a pretended rank of replicas calls and allocates as a real one", "[pretend]") {
  compare("dp", 2, {{0}, {1}});
  compare("zero", 4, {{1}});
}

TEST_CASE("a list has the bytes of each kind of memory", "[pretend]") {
  const TemporaryFolder replicas, sharded;
  constexpr int64_t kLinear = 4 * (128 * 128 + 128);
  pretend(replicas.path(), 64, {5}, {"dp"});
  auto list = read_list(replicas.path(), 5);
  CHECK(list.peaks["parameters"] == 6 * kLinear);
  CHECK(list.peaks["gradients"] == 6 * kLinear);
  CHECK(list.peaks["optimizer"] == 2 * 6 * kLinear);  // AdamW's two moments
  CHECK(list.peaks["buckets"] >= 6 * kLinear);
  CHECK(list.peaks["gathered"] == 0);
  CHECK(list.peaks["activations"] >= 6 * 4 * 64 * 128);
  // A step with the buckets of the first one, and one more with those of the order that it saw.
  CHECK(list.steps.at(2).size() == 1);
  CHECK_THAT(
      list.steps.at(2).at(0), Catch::Matchers::StartsWith("0 all_reduce float ") &&
                                  Catch::Matchers::Contains("(bucket 0)"));

  constexpr int64_t kMlp = 4 * (2 * 4 * 128 * 128 + 4 * 128 + 128);
  pretend(sharded.path(), 64, {5}, {"fsdp"});
  list = read_list(sharded.path(), 5);
  CHECK(list.peaks["parameters"] >= 4 * kMlp / 64);
  CHECK(list.peaks["parameters"] < 4 * kMlp / 60);
  CHECK(list.peaks["gathered"] >= kMlp);
  CHECK(list.peaks["gathered"] < 3 * kMlp);
}

TEST_CASE("a pretended rank of a model that is cut calls as a real one", "[pretend]") {
  compare("fsdp", 4, {{3}});
  compare("tp", 2, {{1}});
}

TEST_CASE("pretended ranks of all stages send to each other", "[pretend]") {
  compare("pp", 4, {{0, 1, 2, 3}});
  compare("3d", 8, {{2, 6}});
}

// Hidden, for it takes minutes: the cases above compare some of these ranks.
TEST_CASE("every pretended rank of every world calls and allocates as a real one", "[.every]") {
  for (const int size : {2, 4, 8}) {
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::vector<int>> one_by_one;
    for (const int rank : all) one_by_one.push_back({rank});
    for (const char* axes : {"dp", "zero", "fsdp", "tp"}) compare(axes, size, one_by_one);
    if (size == 4) compare("pp", size, {all});
    if (size == 8) compare("3d", size, {{0, 4}, {1, 5}, {2, 6}, {3, 7}});
  }
}

TEST_CASE("ranks that are present send to each other in any group", "[pretend]") {
  const TemporaryFolder folder;
  pretend(folder.path(), 8, {2, 5}, {"messages"});
  const auto list = read_list(folder.path(), 5);
  CHECK(list.end == "ok");
  CHECK(list.groups.size() == 2 * 3 + 1);
  CHECK(std::count(list.groups.begin(), list.groups.end(), "1 group [2, 3, 4, 5] group 2-5") == 1);
}

TEST_CASE("ranks of 1,024 train over every axis", "[pretend]") {
  const TemporaryFolder folder;
  const auto checkpoint = folder.path() + "/checkpoint";
  std::vector<int> stages;
  for (int stage = 0; stage < 8; ++stage) stages.push_back(37 + 128 * stage);
  pretend(folder.path(), 1024, stages, {"all", "2", checkpoint});
  const auto list = read_list(folder.path(), 37 + 128);
  CHECK(list.end == "ok");
  CHECK(std::count(list.groups.begin(), list.groups.end(), "0 default_pg world 0-1023") == 1);
  const auto has_axis = [&](const std::string& ending) {
    return std::any_of(list.groups.begin(), list.groups.end(), [&](const auto& group) {
      return group.size() > ending.size() &&
             group.compare(group.size() - ending.size(), ending.size(), ending) == 0;
    });
  };
  CHECK(has_axis(" pp 37-933:128"));
  CHECK(has_axis(" dp 133-245:16"));
  CHECK(has_axis(" tp 160-175"));
}

namespace {

/// Rank 7 of 16.
Ended run_alone(const TemporaryFolder& folder, const std::string& mode) {
  ProcessOptions options;
  options.environment = {"RANK=7",        "WORLD_SIZE=16",
                         "LOCAL_RANK=7",  "LOCAL_WORLD_SIZE=8",
                         "DDP_PRETEND=7", "DDP_CALLS_DIR=" + folder.path()};
  return Process({PRETEND_WORLD_PROGRAM, mode}, options).wait();
}

}  // namespace

TEST_CASE("a list ends with the status of a process that failed", "[pretend][errors]") {
  const TemporaryFolder folder;
  const auto ended = run_alone(folder, "fails");
  INFO(ended.out << ended.err);
  CHECK(ended.code == 1);
  CHECK(read_list(folder.path(), 7).end == "exit status 1");
}

TEST_CASE("a pretended rank names what it cannot know", "[pretend][errors]") {
  const TemporaryFolder folder;
  const auto ended = run_alone(folder, "beyond");
  INFO(ended.out << ended.err);
  CHECK(
      ended.out.find(
          "load_full_state_dict: expected the dictionary on every rank of a pretended job") !=
      std::string::npos);
  CHECK(ended.out.find("split_group: expected ranks that are processes") != std::string::npos);
  CHECK(
      ended.out.find(
          "recv: expected a sender that is a process, got rank 8 of a pretended job of 16") !=
      std::string::npos);
  CHECK(ended.out.find("ddprun --pretend 16 --ranks 0-15. A pipeline") != std::string::npos);
  const auto list = read_list(folder.path(), 7);
  CHECK(list.end.find("recv: expected a sender") != std::string::npos);
}
