// Jobs in which single ranks are replaced. The ranks are elastic_probe: they keep a count of steps
// in memory, and get that of the others.
#include <sys/stat.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "launch/job/ports.h"
#include "launch/stranger.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::launch::ReservedPort;
using Words = std::vector<std::string>;

namespace {

/// ddprun --elastic with `options`, and the probe with its arguments.
Words elastic(Words options, const Words& probe) {
  options.insert(options.begin(), {"--elastic"});
  options.push_back(ELASTIC_PROBE);
  options.insert(options.end(), probe.begin(), probe.end());
  return ddprun(options);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a killed rank is replaced, and the others go on where they were", "[process]") {
  Process job(elastic({"-n", "3"}, {"100000", "5"}), in_one_stream());
  wait_for_generation(job, 1);
  job.read_until("reached step 20", 3);
  const int survivor = pid_of_slot(job.out(), 1);
  ::kill(pid_of_slot(job.out(), 0), SIGKILL);
  wait_for_generation(job, 2);
  CHECK(pid_of_slot(job.out(), 1) == survivor);
  CHECK(has(job.out(), ": generation 2, rank 0 of 3, step "));
  // The replacement began at the others' step.
  CHECK(!has(job.out(), ": generation 2, rank 0 of 3, step 0\n"));
  for (const int slot : {1, 2}) ::kill(pid_of_slot(job.out(), slot), SIGKILL);  // two at once
  const int last = pid_of_slot(job.out(), 0);
  wait_for_generation(job, 3);
  CHECK(pid_of_slot(job.out(), 0) == last);
  job.send(SIGTERM);
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(
      ended.out,
      ContainsText("was killed by signal 9 (SIGKILL); starting another one (1 of 10)\n") &&
          ContainsText("ddprun: generation 2: 3 ranks (0, 1, 2) go on from step ") &&
          ContainsText("; joined: 0 (") && ContainsText("; the ranks leave after their step\n"));
  CHECK_THAT(ended.out, ContainsText("left at step "));
}

TEST_CASE("with a smaller minimum the others go on at once", "[process]") {
  // Slot 1 throws at step 5 each time.
  const Ended job = run(elastic({"-n", "3", "--min-ranks", "2"}, {"800", "10", "1", "5"}));
  CHECK(job.code == 0);
  CHECK_THAT(
      job.err, ContainsText(": 2 ranks (0, 2) go on from step ") &&
                   ContainsText("its place stays empty: it failed three times in 10 seconds\n"));
  CHECK_THAT(job.out, ContainsText(", rank 1 of 2, step "));
}

TEST_CASE("a job of 1:2 hosts begins with one, and goes on with each that comes", "[process]") {
  const ReservedPort endpoint;
  const Words options = {
      "-n",
      "1",
      "--nnodes",
      "1:2",
      "--rdzv-backend",
      "c10d",
      "--rdzv-endpoint",
      "localhost:" + std::to_string(endpoint.port())};
  const Words probe = {"100000", "5"};
  Process first(elastic(options, probe), in_one_stream());
  wait_for_generation(first, 1);
  first.read_until("rank 0 of 1");
  Process second(elastic(options, probe), in_one_stream());
  wait_for_generation(first, 2);
  second.read_until(": generation 2, rank 1 of 2");
  second.read_until("[1] slot 1 pid ");
  second.send(SIGTERM);
  CHECK(second.wait().code == 128 + SIGTERM);
  wait_for_generation(first, 3);
  first.send(SIGTERM);
  CHECK(first.wait().code == 128 + SIGTERM);
}

TEST_CASE("a killed rank of a host that ddprun -H started is replaced", "[process]") {
  const TemporaryFolder folder;
  const auto rsh = folder.write("rsh", "#!/bin/sh\nshift\nexec sh -c \"$*\"\n");
  ::chmod(rsh.c_str(), 0755);
  Process job(
      elastic({"-H", "127.0.0.1:1,localhost:2", "--rsh", rsh}, {"100000", "5"}), in_one_stream());
  wait_for_generation(job, 1);
  job.read_until("reached step 20", 3);
  const int survivor = pid_of_slot(job.out(), 0);
  ::kill(pid_of_slot(job.out(), 2), SIGKILL);
  wait_for_generation(job, 2);
  job.read_until("generation 2, rank ", 3);
  CHECK(pid_of_slot(job.out(), 0) == survivor);
  job.send(SIGTERM);
  CHECK(job.wait().code == 128 + SIGTERM);
}

TEST_CASE("a job that loses more ranks than it can replace ends with their code", "[process]") {
  const Ended job = run(elastic({"-n", "2", "--max-restarts", "0"}, {"100000", "5", "0", "5"}));
  CHECK(job.code == 1);
  CHECK_THAT(
      job.err, ContainsText("its place stays empty: no restart of 0 is left\n") &&
                   ContainsText("expected at least 2 ranks, got 1, and none can be replaced\n"));
}

TEST_CASE("a program that does not take part is restarted as a whole", "[process]") {
  const Ended job = run(ddprun_sh(
      {"-n", "2", "--elastic", "--max-restarts", "1"},
      "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || "
      "[ $RANK = 0 ] || exit 5"));
  CHECK(job.code == 0);
  CHECK(numbers_after(job.out, "[0] attempt ") == std::vector<int>{0, 1});
  CHECK_THAT(job.err, ContainsText("restart 1 of 1: starting all ranks again\n"));

  const Ended failed = run(ddprun_sh({"-n", "1", "--elastic", "--max-restarts", "1"}, "exit 7"));
  CHECK(failed.code == 7);
  CHECK_THAT(failed.err, ContainsText("gave up: no restart of 1 is left\n"));
}

TEST_CASE("an error of all ranks ends the job with its text", "[process]") {
  const Ended job = run(elastic({"-n", "1"}, {"1000", "5", "0", "9"}));
  CHECK(job.code == 1);
  CHECK_THAT(job.err, ContainsText("rank 0 threw: out of memory\n"));
}

TEST_CASE("a stopped rank is killed and replaced", "[process]") {
  Process job(elastic({"-n", "2", "--lost-after", "4"}, {"100000", "5"}), in_one_stream());
  wait_for_generation(job, 1);
  const int stopped = pid_of_slot(job.out(), 1);
  ::kill(stopped, SIGSTOP);
  wait_for_generation(job, 2);
  CHECK(is_gone(stopped));
  job.send(SIGTERM);
  CHECK_THAT(job.wait().out, ContainsText(") is silent for 4.0 s\n"));
}

TEST_CASE("a second signal ends an elastic job at once", "[process]") {
  Process job(elastic({"-n", "2"}, {"100000", "5"}), in_one_stream());
  wait_for_generation(job, 1);
  job.send(SIGINT);
  CHECK(job.wait().code == 128 + SIGINT);
}

TEST_CASE("a host's ranks leave at SIGTERM, and the other hosts' go on", "[process]") {
  const ReservedPort endpoint;
  const auto host = [&](int node) {
    return elastic(
        {"-n", "2", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv-endpoint",
         "127.0.0.1:" + std::to_string(endpoint.port()), "--min-ranks", "2"},
        {"100000", "5"});
  };
  Process second(host(1), in_one_stream());  // before node 0 exists
  Process first(host(0), in_one_stream());
  wait_for_generation(first, 1);
  wait_for_generation(second, 1);
  ::kill(pid_of_slot(second.out(), 3), SIGKILL);
  second.read_until(": 4 ranks (0, 1, 2, 3) ", 2);
  second.send(SIGTERM);
  const Ended left = second.wait();
  CHECK(left.code == 128 + SIGTERM);
  CHECK(numbers_after(left.out, "left at step ").size() == 2);
  first.read_until(": 2 ranks (0, 1) ");
  first.send(SIGTERM);
  const Ended ended = first.wait();
  CHECK(ended.code == 128 + SIGTERM);
  CHECK_THAT(ended.out, ContainsText("ddprun: rank 3 (pid "));
}

TEST_CASE(
    "the host with the coordinator serves the others after its ranks have left", "[process]") {
  const ReservedPort endpoint;
  const auto host = [&](int node) {
    return elastic(
        {"-n", "1", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv-endpoint",
         "127.0.0.1:" + std::to_string(endpoint.port()), "--min-ranks", "1"},
        {"100000", "5"});
  };
  Process first(host(0), in_one_stream());
  Process second(host(1), in_one_stream());
  wait_for_generation(first, 1);
  first.send(SIGTERM);
  second.read_until(": 1 rank (1) go on ");
  ::kill(pid_of_slot(second.out(), 1), SIGKILL);  // no other has the state
  second.read_until(": 1 rank (1) begin");
  second.send(SIGTERM);
  CHECK(second.wait().code == 128 + SIGTERM);
  CHECK(first.wait().code == 128 + SIGTERM);
}

TEST_CASE("a coordinator that is killed goes on from its state", "[process]") {
  const TemporaryFolder folder;
  const auto state = folder.file("state");
  auto endpoint = std::make_unique<ReservedPort>();
  const int port = endpoint->port();
  const auto coordinate = ddprun(
      {"--coordinate", std::to_string(port), "--max-ranks", "3", "--token", "t", "--state", state,
       "--lost-after", "4"});
  ProcessOptions by_hand;
  by_hand.environment = {"DDP_COORDINATOR=127.0.0.1:" + std::to_string(port) + "/t", "DDP_SLOT"};
  const auto member = [&] {
    return std::make_unique<Process>(Words{ELASTIC_PROBE, "100000", "5"}, by_hand);
  };
  const auto a = member();
  const auto b = member();
  const auto c = member();
  {
    Process first(coordinate, in_one_stream());
    wait_for_generation(first, 1);
    for (const auto& one : {&a, &b, &c}) (*one)->read_until("reached step 20");
    const Ended second = run(coordinate);
    CHECK(second.code == 1);
    first.send(SIGKILL);
    first.wait();
  }
  Process again(coordinate);
  again.read_until("DDP_COORDINATOR=");
  b->send(SIGKILL);  // two of three come back: a majority
  const auto d = member();
  for (const auto& one : {&a, &c, &d}) (*one)->read_until(": generation 2,");
  CHECK(!has(d->out(), "step 0\n"));
  const auto answer_to = [&](const std::string& token) {
    return answer_to_stranger(port, "hello " + token + " 5 -1 1 host").value_or("");
  };
  CHECK(answer_to("of_another_job") == "");
  CHECK_THAT(answer_to("t"), ContainsText("you "));
  again.send(SIGTERM);
  CHECK(again.wait().code == 128 + SIGTERM);
}

TEST_CASE("ddprun refuses elastic options that do not fit", "[process][errors]") {
  const auto error_of = [](Words options) {
    const Ended ended = run(ddprun(std::move(options)));
    CHECK(ended.code == 2);
    return ended.err;
  };
  CHECK_THAT(error_of({"-n", "2", "--min-ranks", "1", "p"}), ContainsText("expected --elastic"));
  CHECK_THAT(
      error_of({"-n", "2", "--elastic", "--min-ranks", "3", "p"}),
      ContainsText("--min-ranks: expected no more than all ranks (2), got 3"));
  CHECK_THAT(
      error_of({"-n", "2", "--elastic", "--lost-after", "1", "p"}),
      ContainsText("--lost-after: expected 2 seconds or more"));
  CHECK_THAT(error_of({"--coordinate", "7", "p"}), ContainsText("no program beside it"));
  CHECK_THAT(error_of({"--coordinate", "7"}), ContainsText("expected --max-ranks beside it"));
  CHECK_THAT(
      error_of({"-n", "2", "--elastic", "--coordinator", "h:1", "p"}),
      ContainsText("expected HOST:PORT/TOKEN, got 'h:1'"));
  CHECK_THAT(error_of({"--elastic", "p"}), ContainsText("--nproc-per-node is required"));
}
