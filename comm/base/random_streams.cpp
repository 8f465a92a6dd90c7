#include <ddp/internal/random_streams.h>

#include <algorithm>
#include <mutex>

#include <ATen/Context.h>

namespace ddp {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct RandomStream {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::Device device;
  at::Generator generator;
};

class RandomStreams {
 public:
  // Never destroyed: a thread may draw numbers while the process exits.
  static RandomStreams& of_process() {
    static auto* streams = new RandomStreams;
    return *streams;
  }

  at::Generator find_or_make(const GroupPtr& group, c10::Device device, uint64_t seed) {
    const std::lock_guard lock(mutex_);
    forget_those_of_ended_groups();
    const auto found = std::find_if(streams_.begin(), streams_.end(), [&](const auto& stream) {
      return stream.group.lock() == group && stream.device == device;
    });
    if (found != streams_.end()) return found->generator;
    auto generator = at::globalContext().defaultGenerator(device).clone();
    generator.set_current_seed(seed);
    streams_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), device, generator});
    return generator;
  }

  std::vector<at::Generator> all() {
    const std::lock_guard lock(mutex_);
    forget_those_of_ended_groups();
    std::vector<at::Generator> generators;
    for (const auto& stream : streams_) generators.push_back(stream.generator);
    return generators;
  }

 private:
  void forget_those_of_ended_groups() {
    streams_.erase(
        std::remove_if(
            streams_.begin(), streams_.end(),
            [](const auto& stream) { return stream.group.expired(); }),
        streams_.end());
  }

  std::mutex mutex_;
  std::vector<RandomStream> streams_;
};

}  // namespace

at::Generator random_stream_of(const GroupPtr& group, c10::Device device, uint64_t seed) {
  return RandomStreams::of_process().find_or_make(group, device, seed);
}

std::vector<at::Generator> random_streams() { return RandomStreams::of_process().all(); }

}  // namespace ddp
