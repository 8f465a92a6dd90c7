// One rank, RANK of WORLD_SIZE, of a training in which a rank fails: a process, which can end or
// stop, and which hosts the store if it is rank 0.
//
// monitored_world WHAT PLACE VICTIM BACKEND SECONDS
//   WHAT     kill, stop, exit (without destroy_process_group) or throw: what VICTIM does
//   PLACE    forward, backward, between (two steps), join (its body) or main_first (its function):
//            where VICTIM fails
//   SECONDS  the group's timeout
//
// monitored_world again PLACE VICTIM BACKEND SECONDS METHOD
//   makes and destroys the group eight times at one address: METHOD is "env://", "tcp://" (at
//   MASTER_ADDR) or "file:///path"; if PLACE is not "none", VICTIM throws there each time, and all
//   ranks catch. Every other time a rank still holds the wrapper of the time before, and with it
//   the group.
// monitored_world lose TIMES VICTIM BACKEND SECONDS
//   makes groups with one rank more than the WORLD_SIZE processes that are started with this
//   command. The additional one is rank VICTIM, 0 or the last: a new process each time, which kills
//   itself after two steps. The others continue without it, TIMES times, and print their
//   descriptors and threads; the fourth time they lose it in new_group.
//
// The others print the resulting error and after how many milliseconds it was thrown, destroy the
// group, and print how long that took. They ignore ddprun's SIGTERM, because the tests are about
// ranks that read the failure.
#include <dirent.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/join.h>
#include <ddp/main_first.h>
#include <torch/torch.h>

namespace comm_monitored_world {

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// A fault that this rank injects at a given place, once it is armed.
class Fault {
 public:
  Fault(std::string what, std::string place) : what_(std::move(what)), place_(std::move(place)) {}

  const std::string& place() const { return place_; }
  void arm() { armed_ = true; }

  void inject_at(const std::string& place) {
    if (!armed_ || place != place_) return;
    if (what_ == "kill") std::raise(SIGKILL);
    if (what_ == "stop") std::raise(SIGSTOP);
    if (what_ == "exit") std::exit(EXIT_SUCCESS);
    throw std::runtime_error("user boom");
  }

 private:
  const std::string what_, place_;
  bool armed_ = false;
};

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(Fault& fault) : fault_(fault) {}

  at::Tensor forward(const at::Tensor& x) {
    auto y = first_->forward(x);
    fault_.inject_at("forward");
    y.register_hook([this](const at::Tensor&) { fault_.inject_at("backward"); });
    return second_->forward(y);
  }

 private:
  Fault& fault_;
  torch::nn::Linear first_ = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear second_ = register_module("second", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Net);

int again(int argc, char** argv) {
  TORCH_CHECK(argc == 7, "expected a place, a rank, a backend, seconds and a method");
  const int rank = std::atoi(std::getenv("RANK"));
  const int size = std::atoi(std::getenv("WORLD_SIZE"));
  std::string method = argv[6];
  if (method == "tcp://") {
    method += c10::str(std::getenv("MASTER_ADDR"), ':', std::getenv("MASTER_PORT"));
  }
  constexpr int kTimes = 8;
  std::optional<ddp::DistributedDataParallel<Net>> kept;
  for (int time = 0; time < kTimes; ++time) {
    ddp::init_process_group(ddp::ProcessGroupOptions()
                                .backend(argv[4])
                                .init_method(method)
                                .rank(rank)
                                .world_size(size)
                                .timeout(std::chrono::seconds(std::atoi(argv[5]))));
    auto sum = torch::full({1}, time);
    ddp::all_reduce(sum);
    TORCH_CHECK(sum.item<int>() == time * size, "a sum of ", sum.item<int>(), " at time ", time);
    Fault fault("throw", argv[2]);
    if (rank == std::atoi(argv[3])) fault.arm();
    ddp::DistributedDataParallel model(Net{fault});
    const auto text = ddp::problem_of([&] {
      for (int i = 0; i < 2; ++i) model->forward(torch::ones({2, 4})).sum().backward();
    });
    const bool has_failed = std::string(argv[2]) != "none";
    TORCH_CHECK(text.empty() != has_failed, "at time ", time, ": ", text);
    kept.reset();
    if (time % 2 == 1) kept.emplace(std::move(model));
    ddp::destroy_process_group();
  }
  return EXIT_SUCCESS;
}

/// \param what  "fd" (descriptors) or "task" (threads). Each count also includes "." and "..".
int count_of(const char* what) {
  DIR* folder = ::opendir(c10::str("/proc/self/", what).c_str());
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

pid_t spawn_self(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_t child = -1;
  TORCH_CHECK(
      ::posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, words.data(), environ) == 0);
  return child;
}

int lose(int argc, char** argv) {
  TORCH_CHECK(argc == 6, "expected how often, a rank, a backend and seconds");
  const int times = std::atoi(argv[2]);
  const int victim = std::atoi(argv[3]);
  const bool is_victim = times == 0;
  const int number = std::atoi(std::getenv("RANK"));
  const int rank = is_victim ? victim : number + (victim == 0 ? 1 : 0);
  const auto meet = [&] {
    ddp::init_process_group(ddp::ProcessGroupOptions()
                                .backend(argv[4])
                                .rank(rank)
                                .world_size(std::atoi(std::getenv("WORLD_SIZE")) + 1)
                                .timeout(std::chrono::seconds(std::atoi(argv[5]))));
  };
  Fault none("", "");
  for (int time = 0; time < std::max(times, 1); ++time) {
    const bool starts = !is_victim && number == 0;
    const auto child = starts ? spawn_self({argv[0], "lose", "0", argv[3], argv[4], argv[5]}) : -1;
    meet();
    {
      ddp::DistributedDataParallel model(Net{none});
      const auto step = [&] { model->forward(torch::ones({2, 4})).sum().backward(); };
      step();
      step();
      if (is_victim) std::raise(SIGKILL);
      const auto start = Clock::now();
      const auto text = ddp::problem_of([&] { time == 3 ? void(ddp::new_group({0})) : step(); });
      std::printf("learned after %.0f ms: %s\n", milliseconds_since(start), text.c_str());
    }
    const auto start = Clock::now();
    ddp::destroy_process_group();
    std::printf("left after %.0f ms\n", milliseconds_since(start));
    if (starts) ::waitpid(child, nullptr, 0);
    std::printf("descriptors %d\nthreads %d\n", count_of("fd"), count_of("task"));
    std::fflush(stdout);
  }
  return EXIT_SUCCESS;
}

void train(Fault& fault, bool is_victim) {
  ddp::DistributedDataParallel model(Net{fault});
  const auto step = [&] { model->forward(torch::ones({2, 4})).sum().backward(); };
  const auto steps = [&] {
    for (int i = 0; i < 3; ++i) {
      step();
      fault.inject_at("between");
      fault.inject_at("join");
    }
  };
  step();
  step();
  if (is_victim) fault.arm();
  const auto start = Clock::now();
  const auto go_on = [&] {
    ddp::main_first([&] { fault.inject_at("main_first"); });
    fault.place() == "join" ? model->join(steps) : steps();
  };
  if (is_victim) return go_on();
  const auto text = ddp::problem_of(go_on);
  std::printf("learned after %.0f ms: %s\n", milliseconds_since(start), text.c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc > 1 && std::string(argv[1]) == "again") return again(argc, argv);
  if (argc > 1 && std::string(argv[1]) == "lose") return lose(argc, argv);
  TORCH_CHECK(argc == 6, "expected what to do, where, a rank, a backend and seconds");
  std::signal(SIGTERM, SIG_IGN);
  at::set_num_threads(1);
  Fault fault(argv[1], argv[2]);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(argv[4]).timeout(
      std::chrono::seconds(std::atoi(argv[5]))));
  train(fault, ddp::get_rank() == std::atoi(argv[3]));
  const auto start = Clock::now();
  ddp::destroy_process_group();
  std::printf("left after %.0f ms\n", milliseconds_since(start));
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "monitored_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace comm_monitored_world
