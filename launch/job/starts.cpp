// How a host's ranks are started, and what is reported of one that could not be.
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <unistd.h>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/in_program/rank_function.h"
#include "launch/job/host_loop.h"
#include "launch/processes/spawn.h"

namespace ddp::launch {
namespace {

// From a start that failed to the next one. Three in 10 seconds would be the last.
constexpr std::chrono::milliseconds kStartAgainAfter(6000);

/// The variables of a rank; in an elastic job also where its coordinator is.
Environment environment_of(
    const LaunchOptions& options, const membership::Address& coordinator, const Attempt& attempt,
    int local_rank) {
  const char* own = std::getenv("OMP_NUM_THREADS");
  const auto inherited = own == nullptr ? std::nullopt : std::optional<std::string>(own);
  const auto threads = omp_threads(options, inherited, usable_cores());
  auto result = rank_environment(current_environment(), options, attempt, local_rank, threads);
  if (!options.elastic) return result;
  const auto is_stale = [](const std::string& entry) {
    return entry.rfind("DDP_COORDINATOR=", 0) == 0 || entry.rfind("DDP_SLOT=", 0) == 0;
  };
  drop_if(result, is_stale);
  result.push_back("DDP_COORDINATOR=" + text_of(coordinator));
  result.push_back(str("DDP_SLOT=", global_rank(options, local_rank)));
  return result;
}

}  // namespace

void HostLoop::start(int local_rank, const Attempt& attempt) {
  const int rank = global_rank(options_, local_rank);
  const bool reads = rank == 0 && !orders_;
  StandardFds fds = {reads ? STDIN_FILENO : null_.get(), STDOUT_FILENO, STDERR_FILENO};
  Output::RankEnds ends;
  int place = outputs_;
  if (options_.prefix) {
    ends = output_.add_rank(rank, open_log(options_.log_dir, attempt.number, rank));
    place = outputs_++;
    fds.out = ends.out.get();
    fds.err = ends.err.get();
  }
  const auto environment = environment_of(options_, coordinator_, attempt, local_rank);
  auto* function = options_.function;
  if (function != nullptr && local_rank == 0) function->begin_attempt();
  const pid_t pid = function != nullptr
                        ? fork_process([&] { function->run(rank, environment); }, fds)
                        : spawn(options_.command, environment, fds);
  processes_.add(rank, pid, place);
  job_.send(str("started ", rank, " ", pid));
}

/// The other ranks go on where this host has no descriptor, memory or process left just now.
void HostLoop::replace(int rank, const Attempt& attempt) {
  try {
    start(rank - global_rank(options_, 0), attempt);
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    const bool may_pass = code == EMFILE || code == ENFILE || code == EAGAIN || code == ENOMEM;
    if (!may_pass) throw;
    failed_starts_.push_back({rank, error.what(), Clock::now() + kStartAgainAfter});
  }
}

/// As exits, after a while in which what lacked may be there again.
void HostLoop::report_failed_starts() {
  const auto is_due = [this, now = Clock::now()](const FailedStart& failed) {
    return state_ != State::Running || now >= failed.report_at;
  };
  for (const auto& failed : failed_starts_) {
    if (!is_due(failed)) continue;
    const auto line = str("exited ", failed.rank, " 0 1 0 could not be started: ", failed.why);
    if (job_) {
      job_.send(line);
    } else {
      unsent_.push_back(line);
    }
  }
  drop_if(failed_starts_, is_due);
}

}  // namespace ddp::launch
