#include "support/one_at_a_time.h"

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/backend.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "support/relay_backend.h"

namespace ddp::testing {
namespace {

std::atomic<size_t> groups{0};

class Message : public c10d::Work {
 public:
  Message(bool sends, int peer, at::Tensor memory)
      : sends(sends), peer(peer), memory(std::move(memory)) {}
  void end(std::exception_ptr error = nullptr) { finish(error); }

  const bool sends;
  const int peer;
  const at::Tensor memory;
};
using MessagePtr = c10::intrusive_ptr<Message>;

/// The streams of a group's ranks.
class Streams {
 public:
  void start(int rank, const MessagePtr& message) {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) return message->end(error());
    streams_[rank].push_back(message);
    while (deliver()) {
    }
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    for (auto& [rank, stream] : streams_) {
      for (const auto& message : stream) message->end(error());
      stream.clear();
    }
  }

 private:
  static std::exception_ptr error() {
    return std::make_exception_ptr(std::runtime_error("the streams were aborted"));
  }

  bool deliver() {
    for (auto& [rank, stream] : streams_) {
      if (stream.empty() || !stream.front()->sends) continue;
      const auto sent = stream.front();
      auto& other = streams_[sent->peer];
      if (other.empty() || other.front()->sends || other.front()->peer != rank) continue;
      const auto received = other.front();
      stream.pop_front();
      other.pop_front();
      received->memory.copy_(sent->memory);
      sent->end();
      received->end();
      return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::map<int, std::deque<MessagePtr>> streams_;  // by rank
  bool is_aborted_ = false;
};

std::shared_ptr<Streams> streams_of(const BackendSetup& setup) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Streams>> all;
  static int made = 0;
  const std::lock_guard lock(mutex);
  // All ranks of the process share this lock, and the first one to come chooses the key.
  const std::string key = "streams";
  if (!setup.store->check({key})) setup.store->set(key, std::to_string(++made));
  auto& known = all[setup.store->get_to_str(key)];
  auto streams = known.lock();
  if (!streams) known = streams = std::make_shared<Streams>();
  return streams;
}

class OneAtATime : public Relay {
 public:
  explicit OneAtATime(const BackendSetup& setup)
      : Relay("one_at_a_time", make_loopback(setup)), streams_(streams_of(setup)) {}

  WorkPtr send(Tensors& tensors, int to, int) override { return start(true, to, tensors[0]); }
  WorkPtr recv(Tensors& tensors, int from, int) override { return start(false, from, tensors[0]); }
  void abort() override {
    streams_->abort();
    Relay::abort();
  }

 private:
  WorkPtr start(bool sends, int peer, const at::Tensor& memory) {
    const auto message = c10::make_intrusive<Message>(sends, peer, memory);
    streams_->start(getRank(), message);
    return message;
  }

  const std::shared_ptr<Streams> streams_;
};

}  // namespace

const char* register_one_at_a_time() {
  [[maybe_unused]] static const bool once = [] {
    const auto make = [](const BackendSetup& setup) -> c10::intrusive_ptr<c10d::Backend> {
      ++groups;
      return c10::make_intrusive<OneAtATime>(setup);
    };
    register_backend(
        "one_at_a_time", BackendDescription().devices({at::kCPU}).waits_on_stream(true).make(make));
    return true;
  }();
  return "one_at_a_time";
}

size_t one_at_a_time_groups() { return groups; }

}  // namespace ddp::testing
