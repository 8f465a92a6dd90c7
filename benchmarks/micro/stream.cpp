// Measures streams: a tar file that is not in the cache beside `cat`, and a slow transform beside
// training steps.
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/sharded_stream.h>

#include "in_turns.h"
#include "micro.h"

namespace {

struct StreamSizes {
  std::string folder = "/tmp";
  int mib = 1024;
  int sample_kib = 128;
  int rounds = 5;
  int batch = 4;
  int transform_ms = 5;
  int step_ms = 11;
  int steps = 200;
  bool waits = false;
};

void run_or_throw(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// A tar file of samples of one file each, which is removed at the end.
class TarOfSamples {
 public:
  explicit TarOfSamples(const StreamSizes& sizes)
      : folder_(sizes.folder + "/ddp-stream-bench"), path_(folder_ + "/samples.tar") {
    run_or_throw("mkdir -p '" + folder_ + "/samples'");
    const int count = sizes.mib * 1024 / sizes.sample_kib;
    std::string bytes(static_cast<size_t>(sizes.sample_kib) * 1024, '\0');
    for (int i = 0; i < count; ++i) {
      for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
        const auto word = (static_cast<uint64_t>(i) << 32 | at) * 0x9e3779b97f4a7c15;
        std::memcpy(&bytes[at], &word, 8);
      }
      std::ofstream(folder_ + "/samples/" + std::to_string(1'000'000 + i) + ".bin") << bytes;
    }
    run_or_throw("tar cf '" + path_ + "' -C '" + folder_ + "' samples && sync '" + path_ + "'");
    run_or_throw("rm -r '" + folder_ + "/samples'");
  }
  ~TarOfSamples() { (void)std::system(("rm -r '" + folder_ + "'").c_str()); }
  TarOfSamples(const TarOfSamples&) = delete;
  TarOfSamples& operator=(const TarOfSamples&) = delete;

  const std::string& path() const { return path_; }

  void leave_cache() const {
    const int fd = ::open(path_.c_str(), O_RDONLY);
    if (fd < 0 || ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) {
      throw std::runtime_error("cannot drop " + path_ + " from the cache");
    }
    ::close(fd);
  }

 private:
  std::string folder_, path_;
};

uint64_t sum_of_words(const char* bytes, size_t size) {
  uint64_t sum = 0;
  for (size_t at = 0; at + 8 <= size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, 8);
    sum += word;
  }
  return sum;
}

// Sums of samples, so that each byte is read where it lies: of copies, and of views.
uint64_t sum_of_copies(const std::string& path, int64_t workers) {
  auto stream = ddp::make_sharded_stream(
      ddp::tar_shards({path}), ddp::ShardedStreamOptions().workers(workers));
  uint64_t sum = 0;
  while (const auto sample = stream.next()) {
    const auto& bytes = sample->at("bin");
    sum += sum_of_words(bytes.data(), bytes.size());
  }
  return sum;
}

uint64_t sum_of_views(const std::string& path, int64_t workers) {
  auto stream = ddp::make_sharded_stream(
      ddp::tar_views({path}), ddp::ShardedStreamOptions().workers(workers));
  uint64_t sum = 0;
  while (const auto sample = stream.next()) {
    const auto& bytes = sample->files.at("bin");
    sum += sum_of_words(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  return sum;
}

void pin_to_one_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(0, &cores);
  if (::sched_setaffinity(0, sizeof cores, &cores) != 0)
    throw std::runtime_error("sched_setaffinity");
}

double gib_a_second(const StreamSizes& sizes, double milliseconds) {
  return sizes.mib / 1024.0 / (milliseconds / 1000);
}

void measure_tar(const StreamSizes& sizes) {
  const TarOfSamples tar(sizes);
  pin_to_one_core();
  uint64_t copied = 0, viewed = 0;
  const auto cold = [&](const auto& read) {
    tar.leave_cache();
    return benchmarks::milliseconds(read);
  };
  std::vector<benchmarks::Way> ways{
      {"cat", [&] { return cold([&] { run_or_throw("cat '" + tar.path() + "' >/dev/null"); }); }},
      {"copies", [&] { return cold([&] { copied = sum_of_copies(tar.path(), 0); }); }},
      {"views", [&] { return cold([&] { viewed = sum_of_views(tar.path(), 0); }); }},
      {"copies, 1 worker", [&] { return cold([&] { copied = sum_of_copies(tar.path(), 1); }); }},
      {"views, 1 worker", [&] { return cold([&] { viewed = sum_of_views(tar.path(), 1); }); }},
  };
  benchmarks::run_in_turns(ways, /*warm_up=*/1, sizes.rounds);
  if (copied != viewed) throw std::runtime_error("views and copies differ");
  for (const auto& way : ways) {
    std::vector<double> ratios;
    for (size_t round = 0; round < way.times.size(); ++round) {
      ratios.push_back(ways[0].times[round] / way.times[round]);
    }
    std::printf(
        "{\"mode\": \"%s\", \"gib_per_s\": %.2f, \"of_cat\": %.2f, \"mib\": %d, \"sample_kib\": "
        "%d, "
        "\"rounds\": %d}\n",
        way.name.c_str(), gib_a_second(sizes, benchmarks::median(way.times)),
        benchmarks::median(ratios), sizes.mib, sizes.sample_kib, sizes.rounds);
  }
}

// A transform that waits needs no core: it shows what the workers add, on a machine whose cores are
// busy, too.
void take(int milliseconds, bool waits) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  if (waits) std::this_thread::sleep_until(end);
  while (std::chrono::steady_clock::now() < end) continue;
}

// A step waits, as for a GPU.
double steps_of_stream(const StreamSizes& sizes, int64_t workers) {
  const auto source = ddp::transform(
      ddp::from_generator([] { return [i = 0]() mutable { return std::optional<int>(i++); }; }),
      [ms = sizes.transform_ms, waits = sizes.waits](int i) { return take(ms, waits), i; });
  auto batches = ddp::batched(
      ddp::make_sharded_stream(source, ddp::ShardedStreamOptions().workers(workers)), sizes.batch,
      [](std::vector<int> samples) { return samples; });
  batches.next();  // the first one has no step before it
  return benchmarks::milliseconds([&] {
           for (int i = 0; i < sizes.steps; ++i) {
             std::this_thread::sleep_for(std::chrono::milliseconds(sizes.step_ms));
             batches.next();
           }
         }) /
         sizes.steps;
}

void measure_transform(const StreamSizes& sizes) {
  std::vector<benchmarks::Way> ways{
      {"steps alone",
       [&] {
         return benchmarks::milliseconds([&] {
                  for (int i = 0; i < sizes.steps; ++i) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(sizes.step_ms));
                  }
                }) /
                sizes.steps;
       }},
      {"transform on the loop's thread", [&] { return steps_of_stream(sizes, 0); }},
      {"1 worker", [&] { return steps_of_stream(sizes, 1); }},
      {"2 workers", [&] { return steps_of_stream(sizes, 2); }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/0, sizes.rounds);
  for (const auto& way : ways) {
    std::printf(
        "{\"mode\": \"%s\", \"ms_per_step\": %.3f, \"of_steps_alone\": %.3f, \"batch\": %d, "
        "\"transform_ms\": %d}\n",
        way.name.c_str(), benchmarks::median(way.times),
        benchmarks::median(way.times) / benchmarks::median(ways[0].times), sizes.batch,
        sizes.transform_ms);
  }
}

}  // namespace

void benchmarks::add_stream(CLI::App& app) {
  auto* command = app.add_subcommand(
      "stream",
      "Reads a tar file that is not in the cache on one core, by cat and by ddp::tar_shards and\n"
      "tar_views, whose bytes are summed; then training steps of a stream with a slow transform.\n"
      "Prints a line of JSON for each way: medians over rounds, in which the ways take turns.");
  static StreamSizes sizes;
  command->add_option("--folder", sizes.folder, "Where the tar file is written, on a disk");
  command->add_option("--mib", sizes.mib, "Size of the tar file")->check(CLI::Range(1, 1 << 20));
  command->add_option("--sample-kib", sizes.sample_kib, "Size of a sample")
      ->check(CLI::Range(1, 1 << 16));
  command->add_option("--rounds", sizes.rounds, "Passes of each way")->check(CLI::Range(1, 100000));
  command->add_option("--batch", sizes.batch, "Samples of a step")->check(CLI::Range(1, 1024));
  command->add_option("--transform-ms", sizes.transform_ms, "Of a sample")
      ->check(CLI::Range(0, 1000));
  command->add_flag("--waits", sizes.waits, "The transform sleeps, and does not compute");
  command->add_option("--step-ms", sizes.step_ms, "Of a step alone")->check(CLI::Range(0, 10000));
  command->add_option("--steps", sizes.steps, "Steps of a pass")->check(CLI::Range(1, 100000));
  command->callback([] {
    measure_transform(sizes);
    measure_tar(sizes);
  });
}
