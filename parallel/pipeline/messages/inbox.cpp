#include "pipeline/messages/inbox.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

namespace ddp {

/// How many messages are received before they are needed: one while another one is computed with.
/// The sender keeps the memory of further ones, as it would without a thread.
constexpr size_t kAhead = 2;

StageInbox::StageInbox(const StageWire& wire, std::vector<ExpectedMessage> expected)
    : wire_(wire), expected_(std::move(expected)), receiver_(wire) {
  if (wire.has_threads() && !expected_.empty()) receiver_.start([this] { receive_all(); });
}

StageMessage StageInbox::take(WaitPoint where) {
  const auto& expected = expected_.at(taken_);
  const auto from = [&] {
    const auto& peer = wire_.name_of(expected.message.peer);
    return ddp::str(where(), ", from stage ", expected.stage, " on ", peer);
  };
  if (!receiver_.has_started()) {
    ++taken_;
    const auto wait = [&](const auto& work) { wire_.monitor->wait(*work, from, Peers::Some); };
    return receive(expected, post_words(kHeaderWords, expected), wait);
  }
  receiver_.wait([&] { return !arrived_.empty(); }, from);
  StageMessage message;
  receiver_.change([&] {
    message = std::move(arrived_.front());
    arrived_.pop_front();
    ++taken_;
  });
  if (auto* const log = CallLog::active()) {
    for (const auto call : message.calls) log->add_wait(call);
  }
  return message;
}

StageInbox::Posted StageInbox::post(
    const at::Tensor& memory, const ExpectedMessage& expected) const {
  const auto where = [&] { return text_of(expected.action, wire_.shape, wire_.group->getRank()); };
  const CallPlace place(where);
  return {memory, wire_.receive(memory, expected.message)};
}

StageInbox::Posted StageInbox::post_words(int64_t count, const ExpectedMessage& expected) const {
  const auto bytes = count * static_cast<int64_t>(sizeof(int64_t));
  return post(at::empty({bytes}, at::device(wire_.header_device).dtype(at::kByte)), expected);
}

StageMessage StageInbox::receive(
    const ExpectedMessage& expected, const Posted& header, Wait wait) const {
  std::vector<int64_t> words;
  const auto append = [&](const Posted& posted) {
    wait(posted.work);
    append_words(posted.memory, words);
  };
  append(header);
  if (const auto rest = words_of_second_part(words); rest > 0) append(post_words(rest, expected));
  StageMessage received{header_of(words), {}};
  const auto& [action, message, stage] = expected;
  check_header(
      received.header, {action.kind, stage, action.microbatch, false, wire_.call},
      on_rank_text(*wire_.group));
  std::vector<Posted> payload;
  for (const auto& description : received.header.tensors) {
    auto& tensor = received.tensors.emplace_back();
    if (!description.is_defined) continue;
    tensor = at::empty(description.sizes, at::device(wire_.device).dtype(description.dtype));
    if (has_bytes(description)) {
      payload.push_back(post(tensor.view({-1}).view(at::kByte), expected));
    }
  }
  for (const auto& posted : payload) wait(posted.work);
  return received;
}

/// The thread.
void StageInbox::receive_all() {
  std::deque<Posted> headers;  // of the messages from the one that is received
  size_t posted = 0;
  for (size_t number = 0; number < expected_.size(); ++number) {
    if (!receiver_.wait_until([&] { return number < taken_ + kAhead; })) return;
    // The next one's too, so that it has come when the elements of this one have.
    for (; posted < std::min(number + kAhead, expected_.size()); ++posted) {
      headers.push_back(post_words(kHeaderWords, expected_[posted]));
    }
    std::vector<uint64_t> calls;  // for which the computing thread waits
    auto* const log = CallLog::active();
    auto message = receive(expected_[number], headers.front(), [&](const auto& work) {
      if (log) calls.push_back(log->take_handle(work.get()));
      receiver_.wait_for(work);
    });
    message.calls = std::move(calls);
    headers.pop_front();
    receiver_.change([&] { arrived_.push_back(std::move(message)); });
  }
}

}  // namespace ddp
