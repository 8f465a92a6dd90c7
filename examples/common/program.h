// The main() that examples share; header only, as it depends on a program's options.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <optional>
#include <thread>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>

#include "default_group.h"
#include "on_all_ranks.h"
#include "progress.h"
#include "usage_error.h"

namespace examples {

/// What this rank shows of its progress on standard output.
inline Progress progress_of_rank() {
  return {std::cout, Progress::choose(ddp::get_rank(), STDOUT_FILENO)};
}

/// Reads the command line and runs the program, which makes the default group; reports an exception
/// in one line.
///
/// \return  the status for main().
template <typename Options>
int run_command(
    const char* name, int argc, const char* const* argv,
    std::optional<Options> (&parse_options)(int, const char* const*, std::ostream&),
    const std::function<void(const Options&)>& run) {
  const auto fail = [name](const char* message, int status) {
    std::cerr << name << ": " << message << std::endl;
    return status;
  };
  try {
    // One rank of each host shows the help. Every rank prints its own errors: the first to fail
    // ends the job, and a message that another rank had to print could be lost.
    std::ostream silent(nullptr);
    const bool shows_help = ddp::get_local_rank() == 0;
    const auto options = parse_options(argc, argv, shows_help ? std::cout : silent);
    if (!options) return 0;
    run(*options);
    return 0;
  } catch (const UsageError& error) {
    return fail(error.what(), 2);
  } catch (const FailedElsewhere&) {
    // Waits for the rank that reports the reason: its end then ends this rank, and not the other
    // way round.
    std::this_thread::sleep_for(std::chrono::seconds(10));
    return 1;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

/// The same with the default group made: of a program whose `options` have a `backend`.
template <typename Options>
int run_program(
    const char* name, int argc, const char* const* argv,
    std::optional<Options> (&parse_options)(int, const char* const*, std::ostream&),
    void (&run)(const Options&, Progress&)) {
  return run_command<Options>(name, argc, argv, parse_options, [&run](const Options& options) {
    const DefaultGroup group(options.backend);
    auto progress = progress_of_rank();
    run(options, progress);
  });
}

}  // namespace examples
