#include <ddp/internal/random_streams.h>

#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/functional.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

struct RandomStream {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::Device device;
  std::string name;
  at::Generator generator;
};

std::string name_of_stream(const c10d::ProcessGroup& group, c10::Device device) {
  return ddp::str(
      group.getGroupName(), ", rank ", group.getRank(), " of ", group.getSize(), ", ", device);
}

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
    const auto found = find_if(streams_, [&](const auto& stream) {
      return stream.group.lock() == group && stream.device == device;
    });
    if (found != streams_.end()) return found->generator;
    auto generator = at::globalContext().defaultGenerator(device).clone();
    generator.set_current_seed(seed);
    const auto name = free_name(name_of_stream(*group, device));
    if (const auto loaded = loaded_.extract(name)) set_generator_state(generator, loaded.mapped());
    streams_.push_back(
        {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), device, name, generator});
    return generator;
  }

  std::map<std::string, at::Tensor> states() {
    const std::lock_guard lock(mutex_);
    forget_those_of_ended_groups();
    auto states = loaded_;  // of streams that this run has not used yet
    for (const auto& stream : streams_) states[stream.name] = generator_state(stream.generator);
    return states;
  }

  void set_states(const std::map<std::string, at::Tensor>& states) {
    const std::lock_guard lock(mutex_);
    forget_those_of_ended_groups();
    loaded_ = states;
    for (const auto& stream : streams_) {
      if (const auto loaded = loaded_.extract(stream.name)) {
        set_generator_state(stream.generator, loaded.mapped());
      }
    }
  }

  std::vector<at::Generator> all() {
    const std::lock_guard lock(mutex_);
    forget_those_of_ended_groups();
    return c10::fmap(streams_, [](const auto& stream) { return stream.generator; });
  }

 private:
  /// Several groups may have the same ranks: those after the first get a number, by their use.
  std::string free_name(const std::string& base) const {
    auto name = base;
    const auto is_its = [&](const RandomStream& stream) { return stream.name == name; };
    for (int i = 2; any_of(streams_, is_its); ++i) name = ddp::str(base, ", number ", i);
    return name;
  }

  void forget_those_of_ended_groups() {
    drop_if(streams_, [](const auto& stream) { return stream.group.expired(); });
  }

  std::mutex mutex_;
  std::vector<RandomStream> streams_;
  std::map<std::string, at::Tensor> loaded_;  // of streams that do not exist yet
};

}  // namespace

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Generator random_stream_of(const GroupPtr& group, c10::Device device, uint64_t seed) {
  return RandomStreams::of_process().find_or_make(group, device, seed);
}

std::vector<at::Generator> random_streams() { return RandomStreams::of_process().all(); }

std::map<std::string, at::Tensor> random_stream_states() {
  return RandomStreams::of_process().states();
}

void set_random_stream_states(const std::map<std::string, at::Tensor>& states) {
  RandomStreams::of_process().set_states(states);
}

}  // namespace ddp
