// ddprun --pretend and --check, with shell scripts that write lists of calls as ranks.
#include <fstream>
#include <string>
#include <vector>

#include "launch/pretend/written_calls.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using Lines = std::vector<std::string>;

namespace {

/// A rank's program: two steps of an all_reduce each, of as many bytes as $bytes says.
constexpr const char* kTrain = R"(
    list=$DDP_CALLS_DIR/rank_$RANK.calls
    line() { (IFS='	'; echo "$*") >> $list; }
    line ddp-calls 1
    line rank $RANK $WORLD_SIZE $LOCAL_WORLD_SIZE
    line group 0 default_pg world 0-$((WORLD_SIZE - 1))
    for step in 0 1; do
      line step ${step}00 $step
      line call $step ${step}50 0 all_reduce float ${bytes:-4096} -1 "bucket 0"
      line wait ${step}50 $step
    done
    line memory parameters 100 100
    line peak 100
    line end 300 ok
)";

Lines pretend(const Lines& options, const std::string& script) {
  Lines all{"--pretend", "16"};
  all.insert(all.end(), options.begin(), options.end());
  return ddprun_sh(all, script);
}

}  // namespace

TEST_CASE("pretended ranks run, and their lists are reported", "[process]") {
  const Ended job = run(pretend(
      {"--ranks", "0,5", "--json", "--link", "1GB/s", "--latency", "0us"},
      std::string(kTrain) + "echo $RANK of $WORLD_SIZE, $DDP_PRETEND"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 0);
  CHECK_THAT(
      job.out, Catch::Matchers::StartsWith(
                   "{\"world_size\": 16, \"ranks\": [\n  {\"rank\": 0, \"step\": 0,"));
  CHECK_THAT(
      job.out,
      ContainsText(
          "\"collectives\": [{\"axis\": \"world\", \"kind\": \"all_reduce\", \"ranks\": 16, "
          "\"calls\": 1, \"bytes\": 4096}], \"compute_ms\": 0.1, \"step_ms\": 0.108") &&
          ContainsText("\"faults\": []}"));
  // The ranks' own lines are not in the object.
  CHECK(sorted_lines(job.err) == Lines{"[0] 0 of 16, 0,5", "[5] 5 of 16, 0,5"});
}

TEST_CASE("a report for readers follows the ranks' output", "[process]") {
  const Ended job = run(pretend({"--rank", "5"}, std::string(kTrain) + "echo trained"));
  CHECK(job.code == 0);
  CHECK(job.err.empty());
  CHECK_THAT(job.out, Catch::Matchers::StartsWith("[5] trained\nrank 5 of 16, step 0\n"));
}

TEST_CASE("ranks whose calls do not fit are an error", "[process]") {
  const TemporaryFolder folder;
  const auto lists = folder.path() + "/lists";
  const Ended job = run(pretend(
      {"--ranks", "0,5,7", "--calls", lists}, "[ $RANK = 5 ] && bytes=8\n" + std::string(kTrain)));
  CHECK(job.code == 1);
  CHECK_THAT(
      job.out,
      ContainsText(
          "order: process group \"default_pg\" (world, ranks 0-15): expected every rank to "
          "call the same collective number 0, but ranks 0, 7 called all_reduce of 4096 "
          "bytes of float (bucket 0, step 0) and rank 5 all_reduce of 8 bytes"));
  // The lists are kept, and can be checked again.
  const Ended again = run(ddprun({"--check", lists, "--json"}));
  CHECK(again.code == 1);
  CHECK_THAT(again.out, ContainsText("\"kind\": \"other_size\", \"ranks\": [5]"));
  CHECK(names_in(lists).size() == 3);
}

TEST_CASE("a folder of lists that cannot be made is named", "[process]") {
  const Ended job = run(pretend({"--rank", "0", "--calls", "/proc/self/lists"}, "true"));
  CHECK(job.code == 1);
  CHECK_THAT(
      job.err,
      ContainsText(
          "ddprun: --calls: expected a folder that can be made, got '/proc/self/lists': "));
}

TEST_CASE("lists of an earlier run are not reported", "[process]") {
  const TemporaryFolder folder;
  std::ofstream(folder.path() + "/rank_0.calls") << WrittenCalls(0, 16).file();
  const Ended job = run(pretend({"--rank", "0", "--calls", folder.path()}, "true"));
  CHECK(job.code == 1);
  CHECK_THAT(job.err, ContainsText("rank_0.calls: expected a list of calls, got No such file"));
}

TEST_CASE("a pretended rank that fails ends the job with its code", "[process]") {
  const Ended job = run(pretend({"--ranks", "3,5"}, "[ $RANK = 5 ] && exit 9; exec sleep 1000"));
  CHECK(job.code == 9);
  CHECK_THAT(job.err, ContainsText("rank 5 (pid ") && ContainsText("exited with code 9"));
  CHECK_THAT(job.err, ContainsText("says it with 0 among --ranks"));
  CHECK(job.out.empty());
  const Ended json = run(pretend({"--rank", "5", "--json"}, "exit 9"));
  CHECK(json.code == 9);
  CHECK(json.out == "{\"exit_code\": 9, \"faults\": []}\n");
}

TEST_CASE("a fault in the order is said beside the failure that it led to", "[process]") {
  // A rank that fails ends the others, so each waits until all lists are there.
  const std::string wait =
      "until [ $(cat $DDP_CALLS_DIR/*.calls | grep -c ^end) = 3 ]; do sleep 0.01; done; exit 4";
  const Ended job =
      run(pretend({"--ranks", "0,5,7"}, "[ $RANK = 5 ] && bytes=8\n" + std::string(kTrain) + wait));
  CHECK(job.code == 4);
  CHECK(job.out.empty());
  CHECK_THAT(job.err, ContainsText("ddprun: order: process group \"default_pg\""));
}

TEST_CASE("calls that a failed rank did not make are no fault", "[process]") {
  const std::string wait =
      "until [ $(cat $DDP_CALLS_DIR/*.calls | grep -c ^end) = 2 ]; do sleep 0.01; done; exit 4";
  const std::string less = "[ $RANK = 5 ] && sed -i '/^call.1/d; /^wait.150/d' $list\n";
  const Ended job = run(pretend({"--ranks", "0,5"}, std::string(kTrain) + less + wait));
  CHECK(job.code == 4);
  CHECK_THAT(job.err, ContainsText("exited with code 4") && !ContainsText("order:"));
}

TEST_CASE("the temporary folder of lists does not stay", "[process]") {
  const TemporaryFolder folder;
  ProcessOptions options;
  options.environment = {"TMPDIR=" + folder.path()};
  const Ended job =
      run(pretend({"--rank", "5"}, std::string(kTrain) + "echo $DDP_CALLS_DIR"), options);
  CHECK_THAT(job.out, ContainsText("[5] " + folder.path() + "/ddprun_"));
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("a real job writes lists that can be checked", "[process]") {
  const TemporaryFolder folder;
  const Ended job = run(ddprun_sh({"-n", "2", "--calls", folder.path()}, kTrain));
  CHECK(job.code == 0);
  CHECK(job.out.empty());
  const Ended check = run(ddprun({"--check", folder.path()}));
  CHECK(check.code == 0);
  CHECK_THAT(check.out, ContainsText("the calls of ranks 0, 1 of 2 meet, in one order"));
  const Ended none = run(ddprun({"--check", folder.path() + "/none"}));
  CHECK(none.code == 1);
  CHECK_THAT(none.err, ContainsText("ddprun: expected rank_0.calls or other lists in "));
}
