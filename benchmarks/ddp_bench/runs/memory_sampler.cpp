#include "memory_sampler.h"

#include <chrono>
#include <fstream>
#include <map>
#include <sstream>

#include <c10/util/Exception.h>

namespace ddp_bench {
namespace {

constexpr auto kPause = std::chrono::milliseconds(1);

std::optional<Pss> pss_of_this_process() {
  std::ostringstream text;
  text << std::ifstream("/proc/self/smaps_rollup").rdbuf();
  return parse_pss(text.str());
}

}  // namespace

std::optional<Pss> parse_pss(const std::string& smaps_rollup) {
  std::map<std::string, int64_t> bytes;
  std::istringstream lines(smaps_rollup);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kibibytes = 0;
    if (fields >> name >> kibibytes) bytes[name] = kibibytes * 1024;
  }
  for (const char* name : {"Pss_Anon:", "Pss_Shmem:", "Pss_File:"}) {
    if (bytes.count(name) == 0) return std::nullopt;
  }
  return Pss{bytes["Pss_Anon:"], bytes["Pss_Shmem:"], bytes["Pss_File:"]};
}

MemorySampler::MemorySampler() {
  TORCH_CHECK(
      pss_of_this_process(),
      "memory: expected Pss_Anon, Pss_Shmem and Pss_File in /proc/self/smaps_rollup, got others or "
      "no such file. Measure on a kernel that tells them.");
  sample();
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    while (!wakes_.wait_for(lock, kPause, [this] { return stops_; })) {
      lock.unlock();
      sample();
      lock.lock();
    }
  });
}

MemorySampler::~MemorySampler() { join(); }

Pss MemorySampler::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

Pss MemorySampler::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

Pss MemorySampler::stop() {
  join();
  sample();
  return peak();
}

void MemorySampler::sample() {
  const auto pss = pss_of_this_process();
  const std::lock_guard lock(mutex_);
  if (!pss) return;
  latest_ = *pss;
  if (pss->own() > peak_.own()) peak_ = *pss;
}

void MemorySampler::join() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  wakes_.notify_one();
  thread_.join();
}

}  // namespace ddp_bench
