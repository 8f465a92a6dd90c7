// ddp_spawn_world CASE: calls ddp::spawn in the way that the case names, and prints how it ended.
#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_spawn_world {
namespace {

using std::chrono::milliseconds;

// Says that the process ran what it has for its end. Other worlds of the program do not arm it.
struct SaysEnd {
  ~SaysEnd() {
    if (is_armed) std::printf("destructor in %s\n", std::getenv("RANK") ? "a rank" : "the parent");
  }
  bool is_armed = false;
} says_end;

void say_pid() {
  std::printf("pid %d\n", ::getpid());
  std::fflush(stdout);
}

void pause_for_ever(int) {
  say_pid();
  for (;;) ::pause();
}

int count_descriptors() {
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  while (::readdir(folder.get()) != nullptr) ++count;
  return count;
}

std::string describe(int signal) {
  struct sigaction action = {};
  sigset_t blocked;
  ::sigaction(signal, nullptr, &action);
  ::sigprocmask(SIG_SETMASK, nullptr, &blocked);
  return c10::str(
      action.sa_handler == SIG_DFL   ? "default"
      : action.sa_handler == SIG_IGN ? "ignored"
                                     : "own",
      sigismember(&blocked, signal) == 1 ? " blocked" : "");
}

std::string state_of_process() {
  char name[16] = {};
  ::prctl(PR_GET_NAME, name);
  return c10::str(
      "descriptors ", count_descriptors(), ", INT ", describe(SIGINT), ", TERM ", describe(SIGTERM),
      ", PIPE ", describe(SIGPIPE), ", CHLD ", describe(SIGCHLD), ", name ", name);
}

void all_reduce_once(int rank) {
  ddp::init_process_group();
  auto sum = torch::full({1}, rank + 1.0);
  ddp::all_reduce(sum);
  std::cout << "rank " << ddp::get_rank() << " of " << ddp::get_world_size() << " sum "
            << sum.item<double>() << " local " << ddp::get_local_rank() << " threads "
            << at::get_num_threads() << '\n';
}

void sum() {
  says_end.is_armed = true;
  std::atexit([] { std::printf("atexit in %s\n", std::getenv("RANK") ? "a rank" : "the parent"); });
  std::ios::sync_with_stdio(false);
  std::cout << "from cout before ";  // held until something flushes it
  std::printf("from stdio before\n");
  ddp::spawn(3, all_reduce_once, ddp::SpawnOptions().omp_threads(2));
  std::cout << "rank is " << (std::getenv("RANK") ? "set" : "not set") << '\n';
}

void throw_beside_a_collective() {
  ddp::spawn(3, [](int rank) {
    ddp::init_process_group();
    say_pid();
    ddp::barrier();
    TORCH_CHECK(rank != 1, "boom on the rank");
    pause_for_ever(rank);
  });
}

void fail_by(const std::function<void()>& failure) {
  ddp::spawn(
      2,
      [&](int rank) {
        if (rank == 0) pause_for_ever(rank);
        failure();
      },
      ddp::SpawnOptions().prefix(false));
}

void ignore_the_end() {
  ddp::spawn(
      2,
      [](int rank) {
        std::signal(SIGTERM, SIG_IGN);
        pause_for_ever(rank);
      },
      ddp::SpawnOptions().grace(milliseconds(200)));
}

void handle_in_parent() {
  std::signal(SIGTERM, [](int) {
    const char text[] = "handler ran\n";
    if (::write(STDOUT_FILENO, text, sizeof text - 1) < 0) ::_exit(9);
  });
  ddp::spawn(2, [](int rank) {
    std::signal(SIGTERM, SIG_DFL);
    pause_for_ever(rank);
  });
}

/// A child of the program's own, and signals as it has set them, are as before.
void leave_the_rest_alone() {
  const pid_t own = ::fork();
  if (own == 0) pause_for_ever(0);
  std::signal(SIGPIPE, [](int) {});
  std::signal(SIGCHLD, SIG_IGN);
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &term, nullptr);
  const auto before = state_of_process();
  ddp::spawn(2, [&](int) {
    std::printf("%s\n", state_of_process() == before ? "as the parent" : "not as the parent");
  });
  const bool is_same = state_of_process() == before && ::kill(own, 0) == 0;
  std::printf("%s\n", is_same ? "as before" : "not as before");
  std::printf("%s\n%s\n", before.c_str(), state_of_process().c_str());
  ::kill(own, SIGKILL);
  std::signal(SIGCHLD, SIG_DFL);  // a check for leaks waits for a child
}

/// Each rank has a child in a session of its own.
void have_children() {
  ddp::spawn(2, [](int rank) {
    if (::fork() == 0) {
      ::setsid();
      if (::fork() != 0) ::_exit(0);
    }
    pause_for_ever(rank);
  });
}

void call_with_a_thread() {
  std::thread thread([] { ::pause(); });
  thread.detach();
  ddp::spawn(2, all_reduce_once);
}

void call_in_a_rank() {
  ddp::spawn(1, [](int) { ddp::spawn(1, [](int) {}); });
}

void start_again() {
  ddp::spawn(
      2,
      [](int rank) {
        const std::string restart = std::getenv("TORCHELASTIC_RESTART_COUNT");
        TORCH_CHECK(rank == 0 || restart != "0", "the first attempt");
        all_reduce_once(rank);
      },
      ddp::SpawnOptions().max_restarts(1));
}

void keep_logs() { ddp::spawn(2, all_reduce_once, ddp::SpawnOptions().log_dir("logs")); }

void give_bad_arguments() {
  const std::function<void(int)> body = [](int) {};
  using Options = ddp::SpawnOptions;
  const std::function<void()> calls[] = {
      [&] { ddp::spawn(0, body); },
      [&] { ddp::spawn(1025, body); },
      [&] { ddp::spawn(2, nullptr); },
      [&] { ddp::spawn(2, body, Options().grace(milliseconds(-1))); },
      [&] { ddp::spawn(2, body, Options().max_restarts(-1)); },
      [&] { ddp::spawn(2, body, Options().omp_threads(0)); },
      [&] { ddp::spawn(2, body, Options().prefix(false).log_dir("logs")); },
  };
  for (const auto& call : calls) {
    try {
      call();
    } catch (const c10::ValueError& error) {
      std::printf("%s\n", error.what_without_backtrace());
    }
  }
}

const std::map<std::string, std::function<void()>> kCases = {
    {"sum", sum},
    {"throws", throw_beside_a_collective},
    {"throws a number", [] { fail_by([] { throw 1; }); }},
    {"exits", [] { fail_by([] { std::_Exit(3); }); }},
    {"is killed", [] { fail_by([] { ::raise(SIGKILL); }); }},
    {"pauses", [] { ddp::spawn(2, pause_for_ever); }},
    {"ignores", ignore_the_end},
    {"handles", handle_in_parent},
    {"rest", leave_the_rest_alone},
    {"children", have_children},
    {"thread", call_with_a_thread},
    {"nested", call_in_a_rank},
    {"rank", [] { ddp::spawn(2, all_reduce_once); }},
    {"again", start_again},
    {"logs", keep_logs},
    {"arguments", give_bad_arguments},
};

}  // namespace

int main(int argc, char** argv) try {
  kCases.at(argc > 1 ? argv[1] : "")();
  std::cout << "spawn returned\n";
  return EXIT_SUCCESS;
} catch (const c10::Error& error) {
  std::printf("%s\n", error.what_without_backtrace());
  return 7;
} catch (const std::exception& error) {
  std::printf("%s\n", error.what());
  return 8;
}

}  // namespace ddp_spawn_world
