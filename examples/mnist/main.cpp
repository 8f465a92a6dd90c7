// Trains MNIST with ddp: alone (`mnist`), or on several ranks (`ddprun -n 2 mnist`).

#include <unistd.h>

#include <chrono>
#include <iostream>
#include <thread>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>

#include "../common/default_group.h"
#include "../common/on_all_ranks.h"
#include "run.h"

namespace {

int fail(const char* message, int status) {
  std::cerr << "mnist: " << message << std::endl;
  return status;
}

int train(const mnist::Options& options) {
  const examples::DefaultGroup group(options.backend);
  examples::Progress progress(
      std::cout, examples::Progress::choose(ddp::get_rank(), STDOUT_FILENO));
  mnist::run(options, progress);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    // One of each host shows the help. Errors are every rank's own: the first to fail ends the job,
    // and would take a message with it that another was to give.
    std::ostream silent(nullptr);
    const bool speaks = ddp::get_local_rank() == 0;
    const auto options = mnist::parse_options(argc, argv, speaks ? std::cout : silent);
    return options ? train(*options) : 0;
  } catch (const mnist::UsageError& error) {
    return fail(error.what(), 2);
  } catch (const examples::FailedElsewhere&) {
    // Time for the rank that says why: its end ends this one as well, and not the other way round.
    std::this_thread::sleep_for(std::chrono::seconds(10));
    return 1;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}
