// Random schedules of an elastic job: the coordinator and the members as they are, everything else
// pretended, in ticks of 50 ms.
#pragma once

#include <cstdint>
#include <string>

namespace ddp::testing {

struct Schedule {
  uint64_t seed = 0;
  int ranks = 4;
  int min_ranks = 4;
  bool hosts = false;     // the network between two hosts is cut
  bool restarts = false;  // the coordinator is ended, and started again
  bool launched = true;   // otherwise processes are started by hand
  bool breaks = false;    // connections break, and the coordinator is stopped
  bool healthy = false;   // nothing else happens, and that after the first generation has begun
};

struct Outcome {
  std::string error;  // empty: every rule held
  int code = -1;      // of the job
  int64_t generations = 0;
  int64_t steps = 0;
  bool started_again = false;
  int lost = 0;    // orders that stop or end a process, once a generation has begun
  int breaks = 0;  // of connections
  int stops = 0;   // of the coordinator
};

/// 15 seconds with deaths, stops, hangs, cuts, joins, leaves, restarts and broken connections, and
/// then quiet ones.
/// Checks that no two generations train at once, that members have one state, that the highest
/// applied step wins, that numbers grow, and that the job ends.
Outcome simulate(const Schedule& schedule);

/// How many a test runs: DDP_SCHEDULES, or 1500.
int schedules();

/// The number of the first one: 0, and other ones for each DDP_TEST_SEED from 2 on.
int first_schedule();

}  // namespace ddp::testing
