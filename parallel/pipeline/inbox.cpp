#include "pipeline/inbox.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/carrier_device.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

/// How many messages are received before they are needed: one while another one is computed with.
/// The sender keeps the memory of further ones, as it would without a thread.
constexpr size_t kAhead = 2;

}  // namespace

StageInbox::StageInbox(
    const ProcessGroup& group, const std::shared_ptr<GroupMonitor>& monitor, at::Device device,
    std::vector<ExpectedMessage> expected)
    : group_(group),
      monitor_(monitor),
      device_(device),
      header_device_(carrier_device(*group)),
      expected_(std::move(expected)) {
  if (has_transfer_threads(device_, header_device_) && !expected_.empty()) {
    receiver_ = std::thread([this] { receive_all(); });
  }
}

StageInbox::~StageInbox() {
  if (!receiver_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  wait_.end();
  receiver_.join();
}

StageMessage StageInbox::take(WaitPoint where) {
  const auto& expected = expected_.at(taken_);
  const auto from = [&] {
    return ddp::str(where(), ", from stage ", expected.stage, " on rank ", expected.message.peer);
  };
  if (!receiver_.joinable()) {
    ++taken_;
    const auto wait = [&](const auto& work) { monitor_->wait(*work, from, Peers::Some); };
    return receive(expected, post_words(kHeaderWords, expected.message), wait);
  }
  const auto has_come = [&] { return !arrived_.empty() || failure_; };
  const auto wait = [&](std::chrono::milliseconds at_most) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, at_most, has_come);
  };
  wait_for_thread(*monitor_, group_, wait, from);
  std::unique_lock lock(mutex_);
  if (arrived_.empty()) {
    const auto failure = failure_;
    lock.unlock();
    monitor_->abort_on_error(from, [&] { std::rethrow_exception(failure); });
  }
  auto message = std::move(arrived_.front());
  arrived_.pop_front();
  ++taken_;
  lock.unlock();
  changed_.notify_all();
  return message;
}

StageInbox::Posted StageInbox::post(
    const at::Tensor& memory, const PipelineMessage& message) const {
  std::vector<at::Tensor> tensors{memory};
  return {
      memory, group_->recv(tensors, static_cast<int>(message.peer), static_cast<int>(message.tag))};
}

StageInbox::Posted StageInbox::post_words(int64_t count, const PipelineMessage& message) const {
  const auto bytes = count * static_cast<int64_t>(sizeof(int64_t));
  return post(at::empty({bytes}, at::device(header_device_).dtype(at::kByte)), message);
}

StageMessage StageInbox::receive(
    const ExpectedMessage& expected, const Posted& header, Wait wait) const {
  const auto& message = expected.message;
  std::vector<int64_t> words;
  const auto append = [&](const Posted& posted) {
    wait(posted.work);
    const auto received = posted.memory.cpu().view(at::kLong);
    const auto* first = received.const_data_ptr<int64_t>();
    words.insert(words.end(), first, first + received.numel());
  };
  append(header);
  if (const auto rest = words_of_second_part(words); rest > 0) append(post_words(rest, message));
  StageMessage received{header_of(words), {}};
  check_header(
      received.header, expected.action.kind, expected.stage, expected.action.microbatch,
      on_rank_text(*group_));
  std::vector<Posted> payload;
  for (const auto& description : received.header.tensors) {
    auto& tensor = received.tensors.emplace_back();
    if (!description.is_defined) continue;
    tensor = at::empty(description.sizes, at::device(device_).dtype(description.dtype));
    if (has_bytes(description)) {
      payload.push_back(post(tensor.view({-1}).view(at::kByte), message));
    }
  }
  for (const auto& posted : payload) wait(posted.work);
  return received;
}

/// Waits until the message may be received, or until none may be.
void StageInbox::wait_until_wanted(size_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_over_ || number < taken_ + kAhead; });
  DDP_CHECK(!is_over_, "PipelineStage: the step has ended.");
}

void StageInbox::receive_all() noexcept {
  try {
    std::deque<Posted> headers;  // of the messages from the one that is received
    size_t posted = 0;
    for (size_t number = 0; number < expected_.size(); ++number) {
      wait_until_wanted(number);
      // The next one's too, so that it has come when the elements of this one have.
      for (; posted < std::min(number + kAhead, expected_.size()); ++posted) {
        headers.push_back(post_words(kHeaderWords, expected_[posted].message));
      }
      auto message =
          receive(expected_[number], headers.front(), [&](const auto& work) { wait_.wait(work); });
      headers.pop_front();
      {
        const std::lock_guard lock(mutex_);
        arrived_.push_back(std::move(message));
      }
      changed_.notify_all();
    }
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
    }
    changed_.notify_all();
  }
}

}  // namespace ddp
