#include <ddp/internal/forward_count.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Passes are numbered by averaged pass, and within it; between two restarts there are fewer passes
// than this.
constexpr uint64_t kPassesPerRestart = uint64_t{1} << 20;

// How long to wait before the store is asked again.
constexpr std::chrono::milliseconds kAskAgain{20};

// Keys of the store, for the wrapper with number W. Ranks record passes at the same time and in any
// order, so each entry has a key of its own: one key for all would lose concurrent writes.
//   forwards/W/first/N  how many ranks have recorded that pass N threw, or are about to
//   forwards/W          the length of the list, including entries that are about to be set
//   forwards/W/I        entry I, from 1
std::string length_key(int wrapper) { return ddp::str("forwards/", wrapper); }

std::string failures_key(int wrapper, uint64_t forward) {
  return ddp::str(length_key(wrapper), "/first/", forward);
}

std::string entry_key(int wrapper, int64_t entry) {
  return ddp::str(length_key(wrapper), "/", entry);
}

FailedForward parse_failed_forward(const std::string& text) {
  FailedForward forward;
  InputText fields(text);
  fields >> forward.rank >> forward.number;
  fields.get();  // a space
  std::getline(fields, forward.why, '\0');
  return forward;
}

}  // namespace

void record_failed_forward(c10d::Store& store, int wrapper, const FailedForward& forward) {
  if (store.add(failures_key(wrapper, forward.number), 1) > 1) return;
  store.set(
      entry_key(wrapper, store.add(length_key(wrapper), 1)),
      ddp::str(forward.rank, " ", forward.number, " ", forward.why));
}

void read_failed_forwards(c10d::Store& store, int wrapper, std::vector<FailedForward>& known) {
  if (!store.check({length_key(wrapper)})) return;
  const auto length = store.add(length_key(wrapper), 0);
  for (auto entry = static_cast<int64_t>(known.size()) + 1; entry <= length; ++entry) {
    if (!store.check({entry_key(wrapper, entry)})) return;  // about to be set
    known.push_back(parse_failed_forward(store.get_to_str(entry_key(wrapper, entry))));
  }
}

/// The part of a ForwardCount that the group's monitor and the store's thread use.
class ForwardCount::Steps : public SharedSteps {
 public:
  explicit Steps(StepsText text) : text_(std::move(text)) {}

  uint64_t count() const override {
    const std::lock_guard lock(mutex_);
    return number_;
  }

  const StepsText& text() const override { return text_; }

  void read(c10d::Store& store) override {
    if (wrapper < 0) return;
    std::unique_lock lock(mutex_);
    auto known = known_;
    lock.unlock();
    read_failed_forwards(store, wrapper, known);
    lock.lock();
    known_ = std::move(known);
  }

  std::optional<std::string> failure() const override {
    const std::lock_guard lock(mutex_);
    for (const auto& forward : known_) {
      // Two averaged passes have ended since: this rank may be one ahead of a rank that threw.
      const bool is_over = forward.number / kPassesPerRestart + 1 < number_ / kPassesPerRestart;
      const bool is_coming = forward.number > number_;
      const bool failed_here = contains(failed_, forward.number);
      if (!is_over && !is_coming && !failed_here) return forward.why;
    }
    return std::nullopt;
  }

  void begin() {
    const std::lock_guard lock(mutex_);
    ++number_;
  }

  void restart() {
    const std::lock_guard lock(mutex_);
    number_ = (number_ / kPassesPerRestart + 1) * kPassesPerRestart;
  }

  uint64_t fail() {
    const std::lock_guard lock(mutex_);
    failed_.push_back(number_);
    return number_;
  }

  /// Whether the current pass threw here.
  bool has_failed() const {
    const std::lock_guard lock(mutex_);
    return !failed_.empty() && failed_.back() == number_;
  }

  std::atomic<int> wrapper{-1};  // its number in the group; -1: not known yet

 private:
  const StepsText text_;
  mutable std::mutex mutex_;          // guards the members below
  uint64_t number_ = 0;               // of the current pass
  std::vector<uint64_t> failed_;      // the passes that threw on this rank
  std::vector<FailedForward> known_;  // the list in the store, as far as it was read
};

ForwardCount::ForwardCount(std::shared_ptr<GroupMonitor> monitor, StepsText text)
    : monitor_(std::move(monitor)), steps_(std::make_shared<Steps>(std::move(text))) {
  steps_->wrapper = monitor_->add_steps(steps_);
}

void ForwardCount::begin() {
  steps_->begin();
  monitor_->clear_error();
}

void ForwardCount::restart() { steps_->restart(); }

uint64_t ForwardCount::since_restart() const { return steps_->count() % kPassesPerRestart; }

void ForwardCount::fail(const std::string& why) noexcept {
  monitor_->note_error(why);
  try {
    const FailedForward forward{monitor_->rank(), steps_->fail(), why};
    monitor_->post([wrapper = steps_->wrapper.load(), forward](c10d::Store& store) {
      record_failed_forward(store, wrapper, forward);
    });
  } catch (const std::exception&) {
    // Out of memory: other ranks find this rank gone, or wait for their timeout.
  }
}

void ForwardCount::await_failures() {
  if (monitor_->size() == 1 || !steps_->has_failed()) return;
  const auto key = failures_key(steps_->wrapper, steps_->count());
  std::future<int64_t> answer;
  const auto have_all_failed = [&](std::chrono::milliseconds at_most) {
    if (!answer.valid()) {
      const auto asked = std::make_shared<std::promise<int64_t>>();
      answer = asked->get_future();
      monitor_->post([asked, key](c10d::Store& store) { asked->set_value(store.add(key, 0)); });
    }
    if (answer.wait_for(at_most) != std::future_status::ready) return false;
    if (answer.get() == monitor_->size()) return true;
    std::this_thread::sleep_for(std::min(at_most, kAskAgain));
    return false;
  };
  monitor_->wait_until(have_all_failed, [] {
    return std::string("waiting for ranks whose forward pass did not throw, as this one's did");
  });
}

}  // namespace ddp
