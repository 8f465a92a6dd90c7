#pragma once

#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `PreemptionNotice`. `check_every`, `exit_code` and the group must be the same on
/// every rank; what each rank listens to may differ.
///
/// Example:
/// ```
/// ddp::PreemptionNotice notice(ddp::PreemptionNoticeOptions().check_every(10));
/// ```
struct PreemptionNoticeOptions {
  /// Signals that are a notice. Default: SIGTERM, SIGUSR1, SIGUSR2
  TORCH_ARG(std::vector<int>, signals) = {SIGTERM, SIGUSR1, SIGUSR2};
  /// A file that is a notice as soon as it exists, on the rank that sees it. One that is there from
  /// the beginning counts: whoever starts the job again removes it before. Default: none
  TORCH_ARG(std::string, path) = "";
  /// Calls of requested() from one in which the ranks ask each other to the next, >= 1. Default: 1
  TORCH_ARG(int64_t, check_every) = 1;
  /// The process's exit code after leave(), from 1 to 255. Default: 143, which is that of a process
  /// that SIGTERM has ended: launchers and queues start such a job again
  TORCH_ARG(int, exit_code) = 128 + SIGTERM;
  /// The ranks that leave together. Default: the default group
  TORCH_ARG(GroupArg, group) = {};
};

/// Lets all ranks save and leave in the same step, once one of them was told that its host will be
/// taken away: by a signal of SLURM, Kubernetes or ddprun, or by a file.
///
/// While an object of this class lives, its signals do not end the process: the handler only sets a
/// flag. So make it before the training loop, and call requested() in every step. A process that
/// does not reach the next step in time is killed.
///
/// Several may live at a time, as where ranks are threads: a signal is for the process, so all that
/// have it among theirs see it. The last one's destructor brings back the handler that was there
/// before the first one, unless the program has set another one in between.
///
/// Not for a program that trains by Elastic, whose ranks leave one by one: see
/// ElasticOptions::leave_on().
///
/// Thread safety: none; use it on the training loop's thread. Signals may reach any thread.
///
/// Example:
/// ```
/// ddp::PreemptionNotice notice;
/// while (step < steps) {
///   train(batch);
///   checkpointer.maybe_save(++step);
///   if (notice.requested()) {
///     checkpointer.save(step);
///     checkpointer.wait();
///     notice.leave();
///   }
/// }
/// ```
class DDP_API PreemptionNotice {
 public:
  /// Installs the handlers.
  ///
  /// \throws c10::ValueError  a signal that cannot be handled, such as SIGKILL; check_every below
  ///         1; an exit code outside of 1 to 255. c10::Error  an empty group.
  ///
  /// Collective: no.
  explicit PreemptionNotice(const PreemptionNoticeOptions& options = {});
  /// Brings the handlers back that were there before.
  ~PreemptionNotice();
  PreemptionNotice(const PreemptionNotice&) = delete;
  PreemptionNotice& operator=(const PreemptionNotice&) = delete;

  /// Whether the ranks leave now. All ranks get true from the same call, although the notice came
  /// to one of them only, or to each in another step; and in every call after it.
  ///
  /// Every rank has to call it equally often.
  ///
  /// \throws c10::Error  there is no default group, and none is given; as all_reduce().
  ///
  /// Collective: yes, in each `check_every`-th call, until it returns true. Blocks: host. Cost:
  /// then, an all-reduce of one number, on the CPU if the group has a backend for it, else on its
  /// current GPU, whose work the host then waits for; and a look for the file, where there is one.
  bool requested();

  /// Ends this process with `exit_code`, once all ranks of the group have called this, or cannot
  /// any more. Save before, and wait for it: Checkpointer::wait().
  ///
  /// It ends as by std::quick_exit(): what C's and C++'s standard streams still hold is written,
  /// but no destructor and no function of atexit() runs, because threads of groups and loaders
  /// still do. A program that wants those returns exit_code() from main() in place of this call.
  ///
  /// Collective: yes. Blocks: host, at most the group's timeout.
  [[noreturn]] void leave();

  /// The exit code of a process that leaves.
  int exit_code() const;

 private:
  struct Impl;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
