#include "launch/environment.h"

#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::launch;

namespace {

LaunchOptions job(int local_ranks, int nodes = 1, int node_rank = 0) {
  LaunchOptions options;
  options.local_ranks = local_ranks;
  options.nodes = nodes;
  options.node_rank = node_rank;
  return options;
}

Environment sorted(Environment environment) {
  std::sort(environment.begin(), environment.end());
  return environment;
}

}  // namespace

TEST_CASE("a rank's environment names it, its world and the master", "[pure]") {
  auto options = job(4, 3, 2);
  options.master_addr = "host0";
  options.max_restarts = 5;
  CHECK(
      sorted(rank_environment({}, options, {2, 29500}, 1, "6")) ==
      Environment{
          "GROUP_RANK=2", "GROUP_WORLD_SIZE=3", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4",
          "MASTER_ADDR=host0", "MASTER_PORT=29500", "OMP_NUM_THREADS=6", "RANK=9",
          "TORCHELASTIC_MAX_RESTARTS=5", "TORCHELASTIC_RESTART_COUNT=2", "WORLD_SIZE=12"});
}

TEST_CASE("ranks are numbered through all hosts without a gap", "[pure]") {
  std::vector<int> ranks;
  for (int node = 0; node < 3; ++node) {
    for (int local = 0; local < 2; ++local) ranks.push_back(global_rank(job(2, 3, node), local));
  }
  CHECK(ranks == std::vector<int>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("inherited variables stay, except those of another job", "[pure]") {
  const Environment inherited = {
      "PATH=/bin",
      "RANK=7",
      "RANKING=first",
      "EMPTY=",
      "WORLD_SIZE=9",
      "MASTER_PORT=1",
      "TORCHELASTIC_USE_AGENT_STORE=True",
      "TORCHELASTIC_RESTART_COUNT=7"};
  const auto result = rank_environment(inherited, job(1), {0, 2}, 0, "1");
  const auto has = [&](const std::string& entry) {
    return std::count(result.begin(), result.end(), entry) == 1;
  };
  for (const char* kept : {"PATH=/bin", "RANKING=first", "EMPTY="}) CHECK(has(kept));
  for (const char* own :
       {"RANK=0", "WORLD_SIZE=1", "MASTER_PORT=2", "TORCHELASTIC_RESTART_COUNT=0"}) {
    CHECK(has(own));
  }
  CHECK(result.size() == 3 + 11);
}

TEST_CASE("OMP_NUM_THREADS: the option, else the user's, else a share of the cores", "[pure]") {
  CHECK(omp_threads(job(2), std::nullopt, 8) == "4");
  CHECK(omp_threads(job(3), std::nullopt, 8) == "2");
  CHECK(omp_threads(job(16), std::nullopt, 8) == "1");
  CHECK(omp_threads(job(2), "7", 8) == "7");
  auto options = job(2);
  options.omp_threads = 3;
  CHECK(omp_threads(options, "7", 8) == "3");
}

TEST_CASE("the quotas of control groups count, of both versions and of all above", "[pure]") {
  ddp::testing::TemporaryFolder mount;
  const auto put = [&](const std::string& folder, const std::string& file, const char* text) {
    for (size_t slash = 0; slash != std::string::npos;) {
      slash = folder.find('/', slash + 1);
      ::mkdir(mount.file(folder.substr(0, slash)).c_str(), 0777);
    }
    mount.write(folder + '/' + file, text);
  };
  const auto cores = [&](const std::string& groups) {
    return cores_of_quota(groups, mount.path());
  };
  CHECK_FALSE(cores("0::/\n"));
  CHECK_FALSE(cores(""));
  CHECK_FALSE(cores("no control group\n"));

  put("job/rank", "cpu.max", "max 100000\n");
  CHECK_FALSE(cores("0::/job/rank\n"));
  put("job", "cpu.max", "450000 100000\n");
  CHECK(cores("0::/job/rank\n") == 4);
  CHECK(cores("0::/job/of/the/host\n") == 4);
  put(".", "cpu.max", "50000 100000\n");
  CHECK(cores("0::/elsewhere\n") == 1);
  CHECK(cores("0::/job/rank\n") == 1);

  put("cpu,cpuacct/a", "cpu.cfs_quota_us", "-1\n");
  put("cpu,cpuacct/a", "cpu.cfs_period_us", "100000\n");
  const std::string first_version = "5:memory:/job\n4:cpu,cpuacct:/a/b\n";
  CHECK_FALSE(cores(first_version));
  put("cpu,cpuacct/a", "cpu.cfs_quota_us", "300000\n");
  CHECK(cores(first_version) == 3);
}

TEST_CASE("there is at least one usable core", "[pure]") { CHECK(usable_cores() >= 1); }
