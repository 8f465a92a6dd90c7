// Runs the transformer's example on ranks that are killed, and in regions.
#include <csignal>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch/job/ports.h"
#include "support/processes.h"
#include "support/temporary_folder.h"
#include "transformer_runs.h"

#include "support/catch.h"

namespace {

using ddp::testing::Ended;
using ddp::testing::Process;
using ddp::testing::TemporaryFolder;
using transformer_runs::Lines;

bool has_slot(pid_t process, int slot) {
  std::ifstream environment("/proc/" + std::to_string(process) + "/environ");
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry == "DDP_SLOT=" + std::to_string(slot)) return true;
  }
  return false;
}

/// The process of a slot among a process's descendants; 0: there is none.
pid_t rank_below(pid_t parent, int slot) {
  const auto id = std::to_string(parent);
  std::ifstream children("/proc/" + id + "/task/" + id + "/children");
  for (pid_t child = 0; children >> child;) {
    if (has_slot(child, slot)) return child;
    if (const auto found = rank_below(child, slot)) return found;
  }
  return 0;
}

pid_t rank_of(const Process& ddprun, int slot) {
  const auto found = rank_below(ddprun.pid(), slot);
  if (found == 0) throw std::runtime_error("no rank has slot " + std::to_string(slot));
  return found;
}

Lines small_transformer(
    const TemporaryFolder& folder, const Lines& more, const std::string& steps = "60") {
  Lines arguments{
      TRANSFORMER_PROGRAM,
      "--text",
      folder.write("text", transformer_runs::letters_and_spaces()),
      "--width",
      "32",
      "--context",
      "16",
      "--heads",
      "2",
      "--layers",
      "1",
      "--steps",
      steps,
      "--warmup",
      "5",
      "--report-every",
      "10",
      "--batch-size",
      "8",
      "--sample",
      "20"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Of rank 0's lines, the results on the held-out text, and the sample.
Lines results_in(const std::string& output) {
  Lines results;
  for (const auto& line : ddp::testing::lines_of(output)) {
    for (const char* word : {"held out ", "sample: "}) {
      const auto at = line.find(word);
      if (at != std::string::npos) results.push_back(line.substr(at, line.find(';') - at));
    }
  }
  return results;
}

}  // namespace

TEST_CASE("a transformer whose ranks are killed ends in the same bits", "[examples][process]") {
  const std::string zero = GENERATE("0", "1", "2");
  CAPTURE(zero);
  const TemporaryFolder folder;
  const std::string steps = "300";  // each kill comes before the last one
  const auto quiet = ddp::testing::run_job(
      2, small_transformer(
             folder, {"--elastic", "--zero", zero, "--save", folder.file("quiet.pt")}, steps));
  INFO(quiet.output);
  REQUIRE(quiet.code == 0);

  Lines command = small_transformer(
      folder, {"--elastic", "--zero", zero, "--save", folder.file("killed.pt")}, steps);
  command.insert(command.begin(), {"-n", "2", "--elastic", "--"});
  auto options = ddp::testing::in_one_stream();
  options.environment = {"OMP_NUM_THREADS=1"};
  Process job(ddp::testing::ddprun(command), options);
  job.read_until("step 10/" + steps);
  ::kill(rank_of(job, 1), SIGKILL);
  job.read_until("generation 2: 2 ranks from step ");
  ::kill(rank_of(job, 0), SIGKILL);  // which prints
  job.read_until("generation 3: 2 ranks from step ");
  const Ended ended = job.wait();
  INFO(ended.out);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsText("was killed by signal 9 (SIGKILL); starting another one"));
  CHECK_THAT(ended.out, ContainsText("parameters: bitwise equal on 2 ranks"));
  CHECK(ddp::testing::run({"cmp", folder.file("quiet.pt"), folder.file("killed.pt")}).code == 0);
  // Lines whose turns were repeated are there twice.
  const auto lines = results_in(ended.out), expected = results_in(quiet.output);
  CHECK(
      std::set<std::string>(lines.begin(), lines.end()) ==
      std::set<std::string>(expected.begin(), expected.end()));
}

TEST_CASE("a transformer trains in regions", "[examples][process]") {
  const TemporaryFolder folder;
  const auto run_with = [&](const Lines& more) {
    return ddp::testing::run_job(4, small_transformer(folder, more));
  };
  const auto held_out = [](const ddp::testing::JobEnded& job) {
    return transformer_runs::losses(job, "held out");
  };
  const auto job = run_with({"--diloco", "10", "--regions", "2"});
  INFO(job.output);
  REQUIRE(job.code == 0);
  CHECK_THAT(job.output, ContainsText("parameters: bitwise equal within each region"));
  CHECK_THAT(job.output, ContainsText("regions: 2, which have exchanged 6 times"));
  REQUIRE(held_out(job).size() == 6);
  CHECK(held_out(job).back() < held_out(job).front());

  const auto other = run_with(
      {"--diloco", "10", "--outer-lr", "0.5", "--outer-momentum", "0.5", "--fragments", "2",
       "--overlap", "3", "--wire", "int8"});
  INFO(other.output);
  REQUIRE(other.code == 0);
  CHECK_THAT(other.output, ContainsText("regions: 4, which have exchanged 12 times"));
  CHECK(held_out(other) != held_out(job));

  // After step 22 a mean is on its way.
  const Lines kept{"--diloco",  "10", "--overlap",          "4",
                   "--regions", "2",  "--checkpoint-every", "22"};
  const auto with = [&](const Lines& more) {
    auto all = kept;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto whole =
      run_with(with({"--checkpoint", folder.file("whole"), "--save", folder.file("whole.pt")}));
  INFO(whole.output);
  REQUIRE(whole.code == 0);
  for (const char* step : {"44", "60"}) {
    ddp::testing::remove_all(folder.file("whole/step-000000" + std::string(step)));
  }
  const auto resumed = run_with(with(
      {"--checkpoint", folder.file("whole"), "--resume", "--save", folder.file("resumed.pt")}));
  INFO(resumed.output);
  REQUIRE(resumed.code == 0);
  CHECK_THAT(resumed.output, ContainsText("resumed after step 22"));
  CHECK(held_out(resumed).back() == held_out(whole).back());
  CHECK(ddp::testing::run({"cmp", folder.file("whole.pt"), folder.file("resumed.pt")}).code == 0);

  const auto uneven = run_with({"--diloco", "10", "--regions", "3"});
  CHECK(uneven.code == 2);
  CHECK_THAT(
      uneven.output,
      ContainsText("--regions: expected a number that divides that of the ranks, 4, got 3"));
}

TEST_CASE("regions of a transformer are killed and join", "[examples][process]") {
  const TemporaryFolder folder;
  auto options = ddp::testing::in_one_stream();
  options.environment = {"OMP_NUM_THREADS=1"};
  int port = 0;
  {
    const ddp::launch::ReservedPort free;
    port = free.port();
  }
  Process coordinator(
      ddp::testing::ddprun(
          {"--coordinate", std::to_string(port), "--max-ranks", "2", "--min-ranks", "2"}),
      options);
  const auto address = [&] {
    coordinator.read_until("DDP_COORDINATOR=");
    coordinator.read_until("\n");
    const auto out = coordinator.out();
    const auto slash = out.find('/');
    return "127.0.0.1:" + std::to_string(port) + out.substr(slash, out.find('\n') - slash);
  }();
  const auto region = [&](const std::string& name, const Lines& ranks) {
    auto command = small_transformer(
        folder,
        {"--diloco", "10", "--coordinator", address, "--seed", name, "--save",
         folder.file(name + ".pt")},
        "600");
    command.insert(command.begin(), ranks.begin(), ranks.end());
    return ddp::testing::ddprun(command);
  };
  Process first(region("1", {"-n", "1"}), options), second(region("2", {"-n", "2"}), options);
  second.read_until("step 100/600");
  second.send(SIGKILL);  // the minimum lets the first one wait, however long another takes to start
  Process third(region("3", {"-n", "2"}), options);
  third.read_until("joined other regions after step ");
  const Ended first_ended = first.wait(), third_ended = third.wait();
  INFO(first_ended.out << third_ended.out);
  CHECK(first_ended.code == 0);
  CHECK(third_ended.code == 0);
  CHECK_THAT(first_ended.out, ContainsText("regions: 2, which have exchanged 60 times"));
  CHECK(ddp::testing::run({"cmp", folder.file("1.pt"), folder.file("3.pt")}).code == 0);
  const Ended coordinator_ended = coordinator.wait();
  INFO(coordinator_ended.out);
  CHECK(coordinator_ended.code == 0);
}
