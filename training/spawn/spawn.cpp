#include <ddp/spawn.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/fork_ranks.h>
#include <ddp/internal/text.h>
#include <ddp/process_group.h>

namespace ddp {
namespace {

bool is_in_rank = false;  // in a process that spawn() has started

std::string variable_or(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

void check_spawn_arguments(
    int nprocs, const std::function<void(int)>& body, const SpawnOptions& options) {
  DDP_CHECK_VALUE(
      1 <= nprocs && nprocs <= launch::kMaxLocalRanks, "spawn: expected nprocs from 1 to ",
      launch::kMaxLocalRanks, ", got ", nprocs, ". It is the number of ranks on this host.");
  DDP_CHECK_VALUE(
      body, "spawn: expected a function for body, got an empty one. Pass what each rank does.");
  DDP_CHECK_VALUE(
      !options.grace() || options.grace()->count() >= 0,
      "SpawnOptions: expected a grace of at least 0 ms, got ",
      options.grace().value_or(std::chrono::milliseconds(0)).count(),
      ". 0 kills the other ranks at once.");
  DDP_CHECK_VALUE(
      options.max_restarts() >= 0, "SpawnOptions: expected max_restarts of at least 0, got ",
      options.max_restarts(), ". 0 starts no rank again.");
  DDP_CHECK_VALUE(
      options.omp_threads().value_or(1) >= 1,
      "SpawnOptions: expected omp_threads of at least 1, got ", options.omp_threads().value_or(1),
      ". Leave it out for an even share of the cores.");
  DDP_CHECK_VALUE(
      options.prefix() || options.log_dir().empty(),
      "SpawnOptions: expected prefix(true) with log_dir, got prefix(false), with which ranks write "
      "past the files. Leave one of them out.");
}

void check_spawn_process() {
  DDP_CHECK(
      !is_in_rank,
      "spawn: expected a process that is no rank, got a call in a rank that spawn started. Start "
      "all ranks by one call in main().");
  // A world of one is replaced, as ddprun does: engines say so of a pod or a task.
  const auto size = variable_or("WORLD_SIZE", "1");
  DDP_CHECK(
      std::getenv("RANK") == nullptr || size == "1",
      "spawn: expected a process that is no rank, got RANK=", variable_or("RANK", ""),
      " and WORLD_SIZE=", size,
      " in the environment: a launcher starts the ranks already. Start the program without it, or "
      "call body in place of spawn.");
  const int threads = launch::count_threads();
  DDP_CHECK(
      threads <= 1, "spawn: expected a process with one thread, got ", threads,
      ". A rank is a copy of this process, into which threads (of LibTorch, of CUDA, or your own) "
      "are not copied. Call spawn first in main(), before the program computes, or start it by "
      "ddprun -n.");
}

/// The forked process has read OMP_NUM_THREADS before it was one.
void set_threads_of_rank() {
  const auto text = variable_or("OMP_NUM_THREADS", "");
  int threads = 0;
  std::from_chars(text.data(), text.data() + text.size(), threads);
  if (threads > 0) at::set_num_threads(threads);
}

std::string text_of_failure(const launch::RanksEnded& ended) {
  std::string text = "spawn: expected body to return on every rank, got ";
  if (!ended.failed) {
    text += ended.signal.empty() ? "an end of the ranks:"
                                 : ended.signal + " to this process, by which the ranks have ended";
  } else if (ended.failed->thrown) {
    text += "an exception on " + ended.failed->rank + ": " + *ended.failed->thrown;
  } else {
    text += ended.failed->rank + ", which " + ended.failed->how + ". Look at its output.";
  }
  for (const auto& remark : ended.remarks) text += "\n" + remark;
  return text;
}

}  // namespace

void spawn(int nprocs, const std::function<void(int)>& body, const SpawnOptions& options) {
  check_spawn_arguments(nprocs, body, options);
  check_spawn_process();
  launch::ForkOptions job;
  job.ranks = nprocs;
  job.grace = options.grace();
  job.prefix = options.prefix();
  job.max_restarts = options.max_restarts();
  job.log_dir = options.log_dir();
  job.omp_threads = options.omp_threads();
  const auto ended = launch::fork_ranks(job, [&](int rank) {
    is_in_rank = true;
    set_threads_of_rank();
    try {
      body(rank);
      destroy_process_group();
    } catch (const c10::Error& error) {
      throw std::runtime_error(text_of(error));
    }
  });
  DDP_CHECK(ended.code == 0, text_of_failure(ended));
  if (!ended.remarks.empty()) TORCH_WARN("spawn: ", joined_by("\n", ended.remarks));
}

}  // namespace ddp
