// One rank, RANK of WORLD_SIZE, of a training whose network or host has a fault.
//
// network_world STEPS SECONDS [BACKEND]
//   SECONDS  the group's timeout
//   BACKEND  default: the library's
//
// Prints "step N" every hundred steps; at the end, a fingerprint of its weights and the longest
// time of a step. Prints an error with the time since the last step. A rank that cannot start
// prints the error and the time until it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/process_group.h>
#include <torch/torch.h>

namespace network_world {

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Flushes each line, which a file or a pipe would hold back.
void print_line(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

class Training {
 public:
  Training() : optimizer_(model_->parameters(), 0.01) {
    torch::manual_seed(static_cast<uint64_t>(ddp::get_rank()));
  }

  void step() {
    optimizer_.zero_grad();
    model_->forward(torch::randn({8, 64})).pow(2).mean().backward();
    optimizer_.step();
  }

  uint64_t fingerprint() const {
    uint64_t hash = 0;
    for (const auto& parameter : model_->parameters()) {
      hash = 31 * hash + ddp::hash_of_bytes(parameter.const_data_ptr(), parameter.nbytes());
    }
    return hash;
  }

 private:
  static torch::nn::Linear seeded_net() {
    torch::manual_seed(0);
    return torch::nn::Linear(64, 64);
  }

  ddp::DistributedDataParallel<torch::nn::Linear> model_{seeded_net()};
  torch::optim::SGD optimizer_;
};

// Returns the error that ended training; "" for none.
std::string train(int steps) {
  double longest = 0;
  uint64_t weights = 0;
  auto start = Clock::now();
  const auto problem = ddp::problem_of([&] {
    Training training;
    for (int step = 1; step <= steps; ++step) {
      start = Clock::now();
      training.step();
      longest = std::max(longest, milliseconds_since(start));
      if (step % 100 == 0) print_line(c10::str("step ", step));
    }
    weights = training.fingerprint();
  });
  if (problem.empty()) {
    print_line(c10::str("weights ", weights, ", longest step ", longest, " ms"));
  } else {
    print_line(c10::str("learned after ", milliseconds_since(start), " ms: ", problem));
  }
  return problem;
}

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3 || argc == 4, "expected steps, seconds and maybe a backend");
  at::set_num_threads(1);
  const auto start = Clock::now();
  const auto problem = ddp::problem_of([&] {
    ddp::init_process_group(ddp::ProcessGroupOptions()
                                .backend(argc == 4 ? argv[3] : "")
                                .timeout(std::chrono::seconds(std::atoi(argv[2]))));
  });
  if (!problem.empty()) {
    print_line(c10::str("refused after ", milliseconds_since(start), " ms: ", problem));
    return EXIT_FAILURE;
  }
  const bool trained = train(std::atoi(argv[1])).empty();
  const auto end = Clock::now();
  ddp::destroy_process_group();
  print_line(c10::str("left after ", milliseconds_since(end), " ms"));
  return trained ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::fprintf(stderr, "network_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace network_world
