// One rank of a long training with every feature, drawn at random; or of many short trainings in
// one process. Ends with exit code 1 where memory, descriptors or mappings grow.
//
//   soak_world steps N BACKEND FOLDER     N steps; checkpoints go to FOLDER
//   soak_world cycles N BACKEND FOLDER    N times: init, wrap, train, save, destroy
//
// DDP_SOAK_TWINS in the environment leaks on purpose, a little in each step or cycle: words of
// "memory descriptor mapping".
#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace soak_world {

namespace {

using Model = ddp::DistributedDataParallel<std::shared_ptr<struct Net>>;

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, bool detour) {
    const auto h = torch::relu(norm(in(x)));
    return out(detour ? h + side(h) : h);
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(32, 128))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(128))};
  torch::nn::Linear side{register_module("side", torch::nn::Linear(128, 128))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(128, 8))};
};

struct Usage {
  int64_t memory = 0;  // in KiB
  int64_t descriptors = 0;
  int64_t mappings = 0;
};

Usage usage() {
  ::malloc_trim(0);  // memory that malloc caches is not a leak
  Usage now;
  std::ifstream smaps("/proc/self/smaps_rollup");
  for (std::string line; std::getline(smaps, line);) {
    // Pages of programs and libraries would hide growth.
    for (const std::string name : {"Pss_Anon:", "Pss_Shmem:"}) {
      if (line.rfind(name, 0) == 0) now.memory += std::atoll(line.c_str() + name.size());
    }
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++now.mappings;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++now.descriptors;
  ::closedir(folder);
  return now;
}

void leak_if_asked() {
  const char* given = std::getenv("DDP_SOAK_TWINS");
  const std::string twins = given ? given : "";
  const auto leaks = [&](const char* what) { return twins.find(what) != std::string::npos; };
  if (leaks("memory")) {
    auto* leaked = static_cast<volatile char*>(std::malloc(64 << 10));
    for (int i = 0; i < 64 << 10; i += 512) leaked[i] = 1;
  }
  if (leaks("descriptor")) (void)!::open("/dev/null", O_RDONLY);
  if (leaks("mapping")) {
    // Alternates the protection, so that the kernel does not merge it with its neighbours.
    static int protection = PROT_READ;
    protection = protection == PROT_READ ? PROT_NONE : PROT_READ;
    (void)::mmap(nullptr, 4096, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
}

// A sanitizer keeps freed memory, and maps memory for itself.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/// Checks whether a number grows over the second half of a run, after all one-time allocations.
class Watch {
 public:
  /// \param done  share of the run, 0 to 1.
  void sample(double done) {
    if (done < 0.5) return;
    const auto now = usage();
    if (samples_.empty()) std::printf("at half: %s\n", text(now).c_str());
    samples_.push_back(now);
  }

  /// \return whether nothing has grown: compares the least of the last samples with the most of the
  ///         first.
  bool report() const {
    const auto third = samples_.size() / 3;
    const auto grown = [&](int64_t Usage::*what) {
      const auto less = [what](const Usage& a, const Usage& b) { return a.*what < b.*what; };
      const auto before = *std::max_element(samples_.begin(), samples_.begin() + third, less);
      const auto after = *std::min_element(samples_.end() - third, samples_.end(), less);
      return static_cast<double>(after.*what - before.*what) / static_cast<double>(before.*what);
    };
    std::printf("at the end: %s\n", text(samples_.back()).c_str());
    // The kernel may merge small pages, not all of them in use, into one huge page.
    constexpr double kHugePage = 2048;
    const double memory =
        grown(&Usage::memory) - kHugePage / static_cast<double>(samples_.back().memory);
    const double descriptors = grown(&Usage::descriptors);
    const double mappings = grown(&Usage::mappings);
    std::printf(
        "rank %d grew by: memory %.2f%%, descriptors %.2f%%, mappings %.2f%%\n", ddp_rank_,
        100 * memory, 100 * descriptors, 100 * mappings);
    return descriptors <= 0 && (kSanitized || (memory < 0.01 && mappings <= 0));
  }

  void set_rank(int rank) { ddp_rank_ = rank; }

 private:
  static std::string text(const Usage& u) {
    return std::to_string(u.memory) + " KiB, " + std::to_string(u.descriptors) + " descriptors, " +
           std::to_string(u.mappings) + " mappings";
  }

  std::vector<Usage> samples_;
  int ddp_rank_ = 0;
};

class Training {
 public:
  explicit Training(const std::string& folder)
      : checkpoints_(folder, ddp::CheckpointerOptions().keep_last(2)) {
    checkpoints_.add("model", model_).add("optimizer", optimizer_);
  }

  /// \param draw  the same on all ranks.
  void step(double draw, int64_t number) {
    if (draw < 0.10) {
      const auto guard = model_->no_sync();
      train(false);
    } else if (draw < 0.25) {
      train(true);  // else "side" is unused
    } else if (draw < 0.30) {
      model_->join([&] {
        for (int i = 0; i <= ddp::get_rank(); ++i) train(false);
      });
    } else if (draw < 0.31) {
      checkpoints_.save(number);
      saved_ = true;
    } else if (draw < 0.315 && saved_) {
      checkpoints_.load_latest();
    } else {
      train(false);
      optimizer_.step();
      optimizer_.zero_grad();
    }
  }

  void finish() { checkpoints_.wait(); }

 private:
  void train(bool detour) {
    model_->forward(torch::randn({16, 32}), detour).square().mean().backward();
  }

  Model model_{
      std::make_shared<Net>(), ddp::DistributedDataParallelOptions().find_unused_parameters(true)};
  torch::optim::Adam optimizer_{model_->parameters(), torch::optim::AdamOptions(1e-4)};
  ddp::Checkpointer checkpoints_;
  bool saved_ = false;
};

constexpr int kSamples = 60;  // in the second half

bool run_steps(int64_t steps, const std::string& backend, const std::string& folder) {
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(backend));
  Watch watch;
  watch.set_rank(ddp::get_rank());
  {
    Training training(folder);
    std::mt19937 chance(7);
    std::uniform_real_distribution<double> draw;
    for (int64_t step = 1; step <= steps; ++step) {
      training.step(draw(chance), step);
      leak_if_asked();
      if (step % std::max<int64_t>(1, steps / (2 * kSamples)) != 0) continue;
      training.finish();
      watch.sample(static_cast<double>(step) / static_cast<double>(steps));
    }
  }
  const bool good = watch.report();
  ddp::destroy_process_group();
  return good;
}

bool run_cycles(int64_t cycles, const std::string& backend, const std::string& folder) {
  Watch watch;
  for (int64_t cycle = 1; cycle <= cycles; ++cycle) {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend(backend));
    watch.set_rank(ddp::get_rank());
    {
      Training training(folder);
      for (int step = 0; step < 5; ++step) training.step(0.2 * step, 5 * cycle + step);
      training.step(0.305, 5 * cycle);  // saves
      training.finish();
    }
    ddp::destroy_process_group();
    leak_if_asked();
    watch.sample(static_cast<double>(cycle) / static_cast<double>(cycles));
  }
  return watch.report();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    const std::string mode = argv[1];
    const auto run = mode == "steps" ? run_steps : run_cycles;
    return run(std::atoll(argv[2]), argv[3], argv[4]) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

}  // namespace soak_world
