// An engine around ddprun (Kubernetes, SLURM and others) says much of the job by its variables.
#pragma once

#include <chrono>
#include <string>

#include "launch/pet_variables.h"

namespace ddp::launch {

/// How long hosts that agree wait for each other, where the command line has no join_timeout:
/// longer in Kubernetes, whose pods wait for nodes and images.
std::chrono::seconds default_join_timeout(const Variables& variables);

/// Names the job of the engine in the same way on all of its hosts: "SLURM_JOB_ID=4242".
///
/// \return "": there is no engine, or it has no such name.
std::string job_of_engine(const Variables& variables);

/// Whether a host with the id `other` is of the job with the id `own`: equal ids, or one of them is
/// kUnknownJob and the other one job_of_engine(). Not all hosts of a job have the engine's
/// variables, if somebody started them by ssh.
bool is_same_job(const std::string& own, const std::string& other);

/// The id of a job of several hosts that has none.
constexpr const char* kUnknownJob = "job";

/// Says why this ddprun is one of several that were started by one command, for a user who told
/// none of them of the others; each makes a world of its own then.
///
/// \return "": it is alone, as far as the variables say.
std::string note_of_others(const Variables& variables);

}  // namespace ddp::launch
