// Several hosts that restart together: several ddpruns on the loopback device.
#include <csignal>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ddp/internal/membership/address.h>

#include "launch/job/ports.h"
#include "launch/stranger.h"
#include "support/processes.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::launch::ReservedPort;

namespace {

const std::string kSayPlace =
    "echo attempt $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE port $MASTER_PORT; ";

/// The command of one of two hosts with two ranks each.
std::vector<std::string> host(
    int node, const ReservedPort& endpoint, const std::string& restarts,
    const std::string& script) {
  return ddprun_sh(
      {"-n", "2", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv-endpoint",
       "127.0.0.1:" + std::to_string(endpoint.port()), "--max-restarts", restarts},
      kSayPlace + script);
}

}  // namespace

TEST_CASE("hosts find their place in PET_* variables", "[process]") {
  const ReservedPort endpoint;
  const auto pod = [&](int node) {
    auto command = ddprun_sh({"-n", "2"}, kSayPlace);
    const std::vector<std::string> variables = {
        "env",
        "PET_NNODES=2",
        "PET_NPROC_PER_NODE=1",
        "PET_NODE_RANK=" + std::to_string(node),
        "PET_MASTER_ADDR=127.0.0.1",
        "PET_MASTER_PORT=" + std::to_string(endpoint.port())};
    command.insert(command.begin(), variables.begin(), variables.end());
    return command;
  };
  Process second(pod(1));
  Process first(pod(0));
  const auto all = first.wait().out + second.wait().out;
  for (int rank = 0; rank < 4; ++rank) {
    CHECK_THAT(
        all, ContainsText(
                 "rank " + std::to_string(rank) + " of 4 port " + std::to_string(endpoint.port())));
  }
}

TEST_CASE("after a failure the ranks of all hosts start again, with another port", "[process]") {
  const ReservedPort endpoint;
  // Ranks of the host that does not fail would run for ever.
  const std::string script =
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 3 ] && exit 5; exec sleep 100";
  Process second(host(1, endpoint, "2", script));  // before node 0 exists
  Process first(host(0, endpoint, "2", script));
  const Ended a = first.wait();
  const Ended b = second.wait();
  CAPTURE(a.out, a.err, b.out, b.err);
  CHECK(a.code == 0);
  CHECK(b.code == 0);
  CHECK_THAT(a.err, ContainsText("another host ended the attempt; ending the ranks of this one\n"));
  CHECK_THAT(a.err, ContainsText("restart 1 of 2: starting 2 ranks again\n"));
  CHECK_THAT(b.err, ContainsText("restart 1 of 2: starting 2 ranks again\n"));
  const auto all = a.out + b.out;
  CHECK(numbers_after(all, "attempt ").size() >= 4);
  std::set<int> ports;
  for (const int port : numbers_after(all, "port ")) ports.insert(port);
  CHECK(ports.size() == 2);
  CHECK(ports.count(endpoint.port()) == 0);
  for (int rank = 0; rank < 4; ++rank) {
    CHECK_THAT(all, ContainsText("attempt 1 rank " + std::to_string(rank) + " of 4"));
  }
}

TEST_CASE("all hosts exit with the last failure's code when no restart is left", "[process]") {
  const ReservedPort endpoint;
  const std::string script = "[ $RANK = 2 ] && exit 7; exec sleep 100";
  Process first(host(0, endpoint, "1", script));
  Process second(host(1, endpoint, "1", script));
  const Ended a = first.wait();
  const Ended b = second.wait();
  CAPTURE(a.err, b.err);
  CHECK(a.code == 7);
  CHECK(b.code == 7);
  CHECK_THAT(a.err, ContainsText("ddprun: gave up: no restart of 1 is left\n"));
  CHECK_THAT(b.err, ContainsText("ddprun: gave up: no restart of 1 is left\n"));
}

TEST_CASE("a ddprun that is ended ends the job on all hosts", "[process]") {
  const int ended = GENERATE(0, 1);
  const int signal = GENERATE(SIGKILL, SIGTERM);
  CAPTURE(ended, signal);
  const ReservedPort endpoint;
  Process first(host(0, endpoint, "3", "exec sleep 100"));
  Process second(host(1, endpoint, "3", "exec sleep 100"));
  first.read_until("port ", 2);
  second.read_until("port ", 2);
  (ended == 0 ? first : second).send(signal);
  const Ended left = (ended == 0 ? second : first).wait();
  CAPTURE(left.out, left.err);
  CHECK(left.code == 128 + signal);
  CHECK(left.out.find("attempt 1") == std::string::npos);
  CHECK_THAT(
      left.err, ContainsText(
                    "ddprun: node " + std::to_string(ended) + " ended the job with code " +
                    std::to_string(128 + signal) + "\n"));
}

TEST_CASE("a ddprun that is killed ends the job on all hosts", "[process]") {
  const int lost = GENERATE(0, 1);
  CAPTURE(lost);
  const ReservedPort endpoint;
  Process first(host(0, endpoint, "3", "echo supervisor $PPID; exec sleep 100"));
  Process second(host(1, endpoint, "3", "echo supervisor $PPID; exec sleep 100"));
  first.read_until("supervisor ", 2);
  second.read_until("supervisor ", 2);
  const auto& out = (lost == 0 ? first : second).out();
  REQUIRE(::kill(numbers_after(out, "supervisor ")[0], SIGKILL) == 0);
  const Ended left = (lost == 0 ? second : first).wait();
  CAPTURE(left.out, left.err);
  CHECK(left.code == 1);
  CHECK(left.out.find("attempt 1") == std::string::npos);
  CHECK_THAT(
      left.err, ContainsText(
                    lost == 0 ? "ddprun: lost node 0's ddprun at 127.0.0.1\n"
                              : "ddprun: the ddprun of node 1 is gone\n"));
}

TEST_CASE("two jobs of an engine at one endpoint do not mix", "[process]") {
  const ReservedPort endpoint;
  const auto of_job = [&](const std::string& number, int node, const std::string& script) {
    auto command = host(node, endpoint, "1", script);
    command.insert(command.begin(), {"env", "SLURM_JOB_ID=" + number});
    return command;
  };
  Process first(of_job("1", 0, "exit 0"));
  REQUIRE(eventually([&] {
    return static_cast<bool>(ddp::membership::connect_to("127.0.0.1", endpoint.port()));
  }));
  const Ended other = run(of_job("2", 1, "echo started"));
  CHECK(other.code == 1);
  CHECK(other.out.empty());
  CHECK_THAT(
      other.err, ContainsText("--rdzv-id: expected that of the job at this endpoint") &&
                     ContainsText("got 'SLURM_JOB_ID=2'"));
  const Ended other_first = run(of_job("2", 0, "echo started"));
  CHECK(other_first.code == 1);
  CHECK_THAT(other_first.err, ContainsText("cannot listen on port"));
  // Started by ssh, without the engine's variables.
  const auto second = host(1, endpoint, "1", "exit 0");
  CHECK(run(second).code == 0);
  CHECK(first.wait().code == 0);
}

TEST_CASE("strangers and hosts that do not fit are refused, and the job continues", "[process]") {
  const ReservedPort endpoint;
  Process first(host(0, endpoint, "1", "exit 0"));
  std::optional<std::string> answer;
  REQUIRE(eventually([&] {
    answer = answer_to_stranger(endpoint.port(), "GET / HTTP/1.1");
    return answer.has_value();
  }));
  CHECK(answer == "");

  const Ended other = run(host(1, endpoint, "2", "exit 0"));
  CHECK(other.code == 1);
  CHECK(other.out.empty());
  CHECK_THAT(
      other.err, ContainsText("expected node 0's --nnodes 2, --nproc-per-node 2 and "
                              "--max-restarts 1, got 2, 2 and 2\n"));
  const Ended second_first = run(host(0, endpoint, "1", "exit 0"));
  CHECK(second_first.code == 1);
  CHECK_THAT(
      second_first.err, ContainsText("cannot listen on port " + std::to_string(endpoint.port())));

  CHECK(run(host(1, endpoint, "1", "exit 0")).code == 0);
  CHECK(first.wait().code == 0);
}
