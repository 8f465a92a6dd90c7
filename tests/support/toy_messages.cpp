#include "support/toy_messages.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/backend.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "support/relay_backend.h"
#include "support/toy_device.h"

namespace ddp::testing::toy {
namespace {

constexpr c10::StreamId kFirstRank = 200, kFirstMessages = 300;

std::string& faults() {
  static std::string texts;
  return texts;
}

struct Batch;

struct Message {
  bool sends;
  int peer;
  void* data;
  size_t bytes;
  bool has_moved = false;
  Message* other = nullptr;  // of the peer, once that has started it
  Batch* batch = nullptr;
};

struct Batch {
  int rank = 0;
  size_t number = 0;    // of the rank
  size_t position = 0;  // of its end, on the rank's stream for messages
  std::vector<Message> messages = {};
  bool has_begun = false, has_ended = false;
};

/// The batches of a group's ranks. The device's lock guards them.
class Hub {
 public:
  std::shared_ptr<Batch> start(int rank, std::vector<Message> messages) {
    auto& device = Device::get();
    const std::lock_guard lock(device.mutex);
    auto& own = batches_[rank];
    own.push_back(std::make_shared<Batch>());
    auto& batch = *own.back();
    batch.rank = rank;
    batch.number = own.size() - 1;
    batch.messages = std::move(messages);
    for (auto& message : batch.messages) {
      message.batch = &batch;
      find_other(rank, message);
    }
    const auto computes = Device::key_of(Guard().getStream(c10::Device(at::kPrivateUse1, 0)));
    const auto before = device.streams[computes].end();
    device.push(stream_of(rank), [this, &batch, computes, before] {
      const auto waits = waiting_.find(computes);
      if (waits != waiting_.end() && before > waits->second) fault("waits for what waits for it");
      Device::get().run_until(computes, before);
      run(batch);
    });
    batch.position = device.streams[stream_of(rank)].end();
    return own.back();
  }

  /// Has the current stream wait for the end of a batch.
  void wait_on_stream(Batch& batch) {
    auto& device = Device::get();
    const std::lock_guard lock(device.mutex);
    const auto computes = Device::key_of(Guard().getStream(c10::Device(at::kPrivateUse1, 0)));
    device.push(computes, [this, &batch, computes] {
      waiting_[computes] = Device::get().streams[computes].done_at.size();
      Device::get().run_until(stream_of(batch.rank), batch.position);
      waiting_.erase(computes);
      if (!batch.has_ended) fault("a stream went on before the end of a batch");
    });
  }

  /// For the host, which polls.
  bool has_ended(Batch& batch) {
    auto& device = Device::get();
    const std::lock_guard lock(device.mutex);
    std::set<const Batch*> seen;
    if (!batch.has_ended && can_end(batch, seen)) {
      device.run_until(stream_of(batch.rank), batch.position);
    }
    return batch.has_ended;
  }

 private:
  static Device::Key stream_of(int rank) { return {0, kFirstMessages + rank}; }
  static void fault(const std::string& text) { faults() += text + "; "; }

  /// The messages of two ranks in one direction match in their order.
  void find_other(int rank, Message& message) {
    const auto direction =
        message.sends ? std::make_pair(rank, message.peer) : std::make_pair(message.peer, rank);
    auto& [sends, receives] = open_[direction];
    auto& others = message.sends ? receives : sends;
    if (others.empty()) {
      (message.sends ? sends : receives).push_back(&message);
      return;
    }
    message.other = others.front();
    message.other->other = &message;
    others.erase(others.begin());
  }

  void run(Batch& batch) {
    batch.has_begun = true;
    for (auto& message : batch.messages) {
      if (message.has_moved) continue;
      if (!message.other) return fault("a peer's host has not come to a message yet");
      auto& other = *message.other->batch;
      if (!other.has_begun) {
        for (const auto& earlier : batches_[other.rank]) {
          if (earlier->has_begun && !earlier->has_ended && earlier->number < other.number) {
            return fault("batches wait for each other");
          }
        }
        Device::get().run_until(stream_of(other.rank), other.position);
      }
      if (!message.has_moved) move(message);
    }
    batch.has_ended = true;
  }

  static void move(Message& message) {
    auto& other = *message.other;
    if (!other.batch->has_begun) return fault("a message whose peer does not come");
    if (message.bytes != other.bytes) return fault("a message of another size");
    const auto& from = message.sends ? message : other;
    const auto& to = message.sends ? other : message;
    std::memcpy(to.data, from.data, from.bytes);
    message.has_moved = other.has_moved = true;
  }

  /// Whether all that it needs has been started.
  bool can_end(const Batch& batch, std::set<const Batch*>& seen) {
    if (!seen.insert(&batch).second) return true;
    for (size_t i = 0; i <= batch.number; ++i) {
      const auto& own = *batches_[batch.rank][i];
      for (const auto& message : own.messages) {
        if (!message.other || !can_end(*message.other->batch, seen)) return false;
      }
    }
    return true;
  }

  std::map<int, std::vector<std::shared_ptr<Batch>>> batches_;  // by rank
  std::map<std::pair<int, int>, std::pair<std::vector<Message*>, std::vector<Message*>>> open_;
  std::map<Device::Key, size_t> waiting_;  // where a stream of computations stands
};

class BatchWork final : public c10d::Work {
 public:
  BatchWork(std::shared_ptr<Hub> hub, std::shared_ptr<Batch> batch)
      : hub_(std::move(hub)), batch_(std::move(batch)) {}
  bool isCompleted() override {
    ++Device::get().polls;
    return hub_->has_ended(*batch_);
  }
  bool isSuccess() const override { TORCH_CHECK(false, "isSuccess() is deprecated"); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void synchronize() override { hub_->wait_on_stream(*batch_); }

 private:
  const std::shared_ptr<Hub> hub_;
  const std::shared_ptr<Batch> batch_;
};

std::shared_ptr<Hub> hub_of(const BackendSetup& setup) {
  static std::mutex mutex;
  // For good, because streams may have work of a group that is gone.
  static auto* const all = new std::vector<std::shared_ptr<Hub>>();
  const std::lock_guard lock(mutex);
  const std::string key = "toy messages";
  if (!setup.store->check({key})) {
    setup.store->set(key, std::to_string(all->size()));
    all->push_back(std::make_shared<Hub>());
  }
  return all->at(std::stoul(setup.store->get_to_str(key)));
}

class Messages final : public Relay {
 public:
  explicit Messages(const BackendSetup& setup)
      : Relay("toy_messages", make_loopback(setup)), hub_(hub_of(setup)) {}

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    auto batch = hub_->start(getRank(), std::move(*batch_));
    batch_.reset();
    return c10::make_intrusive<BatchWork>(hub_, std::move(batch));
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return tensors[0].is_cpu() ? inner().send(tensors, to, tag) : add(true, to, tensors[0]);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return tensors[0].is_cpu() ? inner().recv(tensors, from, tag) : add(false, from, tensors[0]);
  }

 private:
  WorkPtr add(bool sends, int peer, const at::Tensor& memory) {
    TORCH_CHECK(batch_, "toy_messages: expected a batch");
    batch_->push_back({sends, peer, memory.data_ptr(), memory.nbytes()});
    return {};
  }

  const std::shared_ptr<Hub> hub_;
  std::optional<std::vector<Message>> batch_;
};

}  // namespace

const char* register_messages() {
  [[maybe_unused]] static const bool once = [] {
    register_backend(
        "toy_messages",
        BackendDescription()
            .devices({at::kCPU, at::kPrivateUse1})
            .waits_on_stream(true)
            .make([](const BackendSetup& setup) -> c10::intrusive_ptr<c10d::Backend> {
              return c10::make_intrusive<Messages>(setup);
            }));
    return true;
  }();
  return "toy_messages";
}

c10::Stream rank_stream(int rank) { return stream(kFirstRank + rank); }

std::string take_faults() {
  const std::lock_guard lock(Device::get().mutex);
  return std::exchange(faults(), "");
}

}  // namespace ddp::testing::toy
