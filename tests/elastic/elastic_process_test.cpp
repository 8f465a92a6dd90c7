// Jobs in which ranks that train are killed, stopped and added. The ranks are
// elastic_training_world, whose steps have the same samples for any number of ranks.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "launch/job/ports.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::launch::ReservedPort;
using Words = std::vector<std::string>;

namespace {

constexpr int kSteps = 160;

ProcessOptions for_jobs() {
  ProcessOptions options = in_one_stream(within(std::chrono::seconds(120)));
  options.environment = {"OMP_NUM_THREADS=1"};
  return options;
}

/// \param pause  milliseconds between steps.
Words trains(
    Words options, const std::string& folder, const std::string& kind = "shm", int pause = 4) {
  options.insert(options.begin(), {"--elastic", "--max-restarts", "50"});
  options.insert(
      options.end(),
      {"--", ELASTIC_WORLD, std::to_string(kSteps), std::to_string(pause), folder, kind});
  return ddprun(options);
}

void wait_for_step_20(Process& job, int ranks) { job.read_until("reached step 20", ranks); }

/// The words after `text`, up to the next comma, at each place.
std::vector<std::string> words_after(const std::string& out, const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; (at = out.find(text, at)) != std::string::npos;) {
    at += text.size();
    words.push_back(out.substr(at, out.find(',', at) - at));
  }
  return words;
}

/// The hashes of the ranks' states at the end.
std::vector<std::string> hashes_in(const std::string& out) {
  return words_after(out, "the end at step " + std::to_string(kSteps) + ", hash ");
}

std::string quiet_hash(int ranks, const std::string& kind = "shm") {
  const TemporaryFolder folder;
  const Ended quiet = run(trains({"-n", std::to_string(ranks)}, folder.path(), kind), for_jobs());
  const auto hashes = hashes_in(quiet.out);
  CHECK(quiet.code == 0);
  REQUIRE(hashes.size() == static_cast<size_t>(ranks));
  return hashes.front();
}

using Samples = std::map<int, std::multiset<int>>;  // by step

Samples samples_in(const std::string& folder) {
  Samples samples;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().filename().string().rfind("steps.", 0) != 0) continue;
    std::ifstream log(file.path());
    for (std::string line; std::getline(log, line) && !log.eof();) {
      std::istringstream numbers(line);
      int step = 0;
      numbers >> step;
      for (int index = 0; numbers >> index;) samples[step].insert(index);
    }
  }
  return samples;
}

/// \return how many steps lack samples, whose rank was killed between its step and its log; -1
/// where
///         a sample was used that is not the step's, or used twice.
int steps_that_lack_samples(const Samples& all, const Samples& some) {
  int lacking = 0;
  for (const auto& [step, samples] : some) {
    const auto& expected = all.at(step);
    if (!std::includes(expected.begin(), expected.end(), samples.begin(), samples.end())) return -1;
  }
  for (const auto& [step, samples] : all) {
    const auto found = some.find(step);
    lacking += found == some.end() || found->second != samples ? 1 : 0;
  }
  return lacking;
}

}  // namespace

TEST_CASE("killed ranks are replaced: the bits of a run without failures", "[process]") {
  const std::string backend = GENERATE("shm", "gloo");
  CAPTURE(backend);
  const auto quiet = quiet_hash(4, backend);
  const TemporaryFolder folder;
  Process job(trains({"-n", "4"}, folder.path(), backend, 20), for_jobs());
  wait_for_generation(job, 1);
  wait_for_step_20(job, 4);
  const int survivor = pid_of_slot(job.out(), 2);
  ::kill(pid_of_slot(job.out(), 0), SIGKILL);
  wait_for_generation(job, 2);
  for (const int slot : {0, 3}) ::kill(pid_of_slot(job.out(), slot), SIGKILL);  // two at once
  job.read_until("starting another one", 3);
  ::kill(pid_of_slot(job.out(), 1), SIGKILL);  // while the others recover
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  CHECK(hashes_in(ended.out) == std::vector<std::string>(4, quiet));
  CHECK(pid_of_slot(ended.out, 2) == survivor);
  CHECK_THAT(ended.out, ContainsText("was killed by signal 9 (SIGKILL); starting another one"));
}

TEST_CASE("ranks that are killed in a save and in an evaluation are replaced", "[process]") {
  const std::string kind = GENERATE("shm,checkpoints,evaluates", "gloo,checkpoints,evaluates,zero");
  CAPTURE(kind);
  const auto quiet = quiet_hash(3, kind);
  const TemporaryFolder folder;
  Process job(trains({"-n", "3"}, folder.path(), kind), for_jobs());
  wait_for_generation(job, 1);
  job.read_until("slot 1 saves");
  ::kill(pid_of_slot(job.out(), 1), SIGKILL);
  wait_for_generation(job, 2);
  job.read_until("slot 2 evaluates");
  ::kill(pid_of_slot(job.out(), 2), SIGKILL);
  const Ended ended = job.wait();
  CAPTURE(ended.out);
  CHECK(ended.code == 0);
  CHECK(hashes_in(ended.out) == std::vector<std::string>(3, quiet));
  CHECK(std::filesystem::exists(folder.file("checkpoints/step-00000140")));
}

TEST_CASE("fewer ranks go on at once, are equal, and use every sample once", "[process]") {
  const TemporaryFolder quiet_folder, folder;
  CHECK(run(trains({"-n", "4"}, quiet_folder.path()), for_jobs()).code == 0);
  Process job(trains({"-n", "4", "--min-ranks", "2"}, folder.path(), "slow"), for_jobs());
  wait_for_generation(job, 1);
  wait_for_step_20(job, 4);
  ::kill(pid_of_slot(job.out(), 0), SIGKILL);
  ::kill(pid_of_slot(job.out(), 1), SIGKILL);
  job.read_until(": 2 ranks (2, 3) go on from step ");
  job.read_until("rank 3 of 4", 2);  // both were replaced
  const Ended ended = job.wait();
  CHECK(ended.code == 0);
  const auto hashes = hashes_in(ended.out);
  REQUIRE(hashes.size() == 4);
  CHECK(hashes == std::vector<std::string>(4, hashes.front()));
  const auto lacking =
      steps_that_lack_samples(samples_in(quiet_folder.path()), samples_in(folder.path()));
  CHECK(lacking >= 0);
  CHECK(lacking <= 2);
}

TEST_CASE("a host joins, and leaves at SIGTERM; no step is lost", "[process]") {
  const TemporaryFolder folder;
  const ReservedPort endpoint;
  const auto host = [&](int node) {
    return trains(
        {"-n", "2", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv-endpoint",
         "127.0.0.1:" + std::to_string(endpoint.port()), "--min-ranks", "2", "--wait", "2"},
        folder.path(), "gathers", 20);
  };
  Process first(host(0), for_jobs());
  first.read_until("generation 1, rank 1 of 2");
  Process second(host(1), for_jobs());
  second.read_until("rank 3 of 4, step ");
  second.send(SIGTERM);
  const Ended stays = first.wait(), leaves = second.wait();
  CAPTURE(stays.out, leaves.out);
  CHECK(stays.code == 0);
  CHECK(leaves.code == 128 + SIGTERM);
  const auto last = hashes_in(stays.out);
  REQUIRE(last.size() == 2);
  CHECK(last[0] == last[1]);
  CHECK(stays.out.rfind(" of 2, step ") > stays.out.rfind(" of 4, step "));
  // Those that left are equal, too, and were not killed.
  const auto at_leaving = words_after(leaves.out, "the end at step ");
  REQUIRE(at_leaving.size() == 2);
  CHECK(at_leaving[0] == at_leaving[1]);
  CHECK(words_after(leaves.out, ", hash ")[0] == words_after(leaves.out, ", hash ")[1]);
  CHECK(leaves.out.find("was killed") == std::string::npos);
}

TEST_CASE("a rank that wakes is fenced; a coordinator that is killed goes on", "[process]") {
  const TemporaryFolder folder;
  auto endpoint = std::make_unique<ReservedPort>();
  const int port = endpoint->port();
  const auto coordinate = ddprun(
      {"--coordinate", std::to_string(port), "--max-ranks", "3", "--min-ranks", "2", "--token", "t",
       "--state", folder.file("state"), "--lost-after", "5"});
  ProcessOptions by_hand = for_jobs();
  by_hand.environment.push_back("DDP_COORDINATOR=127.0.0.1:" + std::to_string(port) + "/t");
  by_hand.environment.emplace_back("DDP_SLOT");
  const auto member = [&] {
    return std::make_unique<Process>(
        Words{ELASTIC_WORLD, std::to_string(kSteps), "60", folder.path(), "shm"}, by_hand);
  };
  auto first = std::make_unique<Process>(coordinate, for_jobs());
  first->read_until("DDP_COORDINATOR=");
  const auto a = member(), b = member(), c = member();
  for (const auto* one : {&a, &b, &c}) (*one)->read_until("reached step 20");
  first->send(SIGKILL);
  first->wait();
  Process again(coordinate, for_jobs());
  again.read_until("DDP_COORDINATOR=");
  b->send(SIGSTOP);
  for (const auto* one : {&a, &c}) (*one)->read_until("generation 2, rank ");
  b->send(SIGCONT);
  const Ended fenced = b->wait();
  CHECK(fenced.code == 4);
  CHECK_THAT(fenced.out, ContainsText("fenced: "));
  const Ended left[] = {a->wait(), c->wait()};
  for (const Ended& ended : left) {
    CHECK(ended.code == 0);
    REQUIRE(hashes_in(ended.out).size() == 1);
    CHECK(hashes_in(ended.out) == hashes_in(left[0].out));
  }
}

// Not in CI: DDP_ELASTIC_KILLS=20 kills that many ranks, at random moments, one or two at once.
TEST_CASE("random kills", "[.kills][process]") {
  const char* count = std::getenv("DDP_ELASTIC_KILLS");
  const char* first_seed = std::getenv("DDP_TEST_SEED");
  const int kills = count == nullptr ? 20 : std::atoi(count);
  const auto quiet = quiet_hash(4);
  std::mt19937 random(first_seed == nullptr ? 1 : std::atoi(first_seed));
  for (int done = 0; done < kills;) {
    const TemporaryFolder folder;
    const bool with_checkpoints = random() % 3 == 0;
    Process job(
        trains({"-n", "4"}, folder.path(), with_checkpoints ? "checkpoints" : "shm"), for_jobs());
    wait_for_generation(job, 1);
    const int at_once = random() % 3 == 0 ? 2 : 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 700));
    const auto first = static_cast<int>(random() % 4);
    for (int i = 0; i < at_once; ++i) ::kill(pid_of_slot(job.out(), (first + i) % 4), SIGKILL);
    done += at_once;
    const Ended ended = job.wait();
    CAPTURE(done, ended.out);
    CHECK(ended.code == 0);
    CHECK(hashes_in(ended.out) == std::vector<std::string>(4, quiet));
  }
}
