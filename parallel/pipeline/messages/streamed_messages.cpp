#include "pipeline/messages/streamed_messages.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

#include "pipeline/messages/transfer.h"

namespace ddp {
namespace {

/// The first stage's word at the beginning of a call: its number, whether it trains, the number of
/// its headers, and whether they are known.
constexpr int64_t kWordLength = 4;

/// Beyond the tags of messages.
int64_t word_tag(const PipelineShape& shape) { return 2 * shape.microbatches * shape.chunks; }

std::string call_text(const StageCall& call) {
  return ddp::str("call ", call.number, call.trains ? ", step()" : ", eval()");
}

bool are_alike(
    const std::vector<TensorDescription>& one, const std::vector<TensorDescription>& other) {
  return one.size() == other.size() && text_of(one) == text_of(other) &&
         std::equal(one.begin(), one.end(), other.begin(), [](const auto& a, const auto& b) {
           return a.requires_grad == b.requires_grad;
         });
}

/// "[4, 8] Float that requires a gradient".
std::string full_text_of(const std::vector<TensorDescription>& tensors) {
  std::vector<std::string> texts;
  for (const auto& tensor : tensors) {
    const char* more = tensor.requires_grad ? " that requires a gradient" : "";
    texts.push_back(text_of(tensor) + more);
  }
  return texts.empty() ? "no tensors" : joined_by(" and ", texts);
}

}  // namespace

KnownHeaders::Choice KnownHeaders::choose(const std::string& batch) {
  if (batch.empty()) return {kMost, false};
  if (const auto found = numbers_.find(batch); found != numbers_.end()) {
    return {found->second, true};
  }
  const auto number = next_;
  next_ = (next_ + 1) % kMost;
  auto& place = batches_[static_cast<size_t>(number)];
  numbers_.erase(place);
  place = batch;
  numbers_[batch] = number;
  return {number, false};
}

CallHeaders& KnownHeaders::of(const Choice& choice) {
  auto& headers = headers_.at(static_cast<size_t>(choice.number));
  if (!choice.is_known) headers = {};
  return headers;
}

StreamedMessages::StreamedMessages(
    const StageWire& wire, const PipelineList& list, KnownHeaders& known,
    const std::optional<std::string>& batch)
    : wire_(wire), list_(list) {
  choice_ = agree(known, batch);
  headers_ = &known.of(choice_);
}

KnownHeaders::Choice StreamedMessages::agree(
    KnownHeaders& known, const std::optional<std::string>& batch) {
  const auto tag = word_tag(wire_.shape);
  if (batch) {
    const auto choice = known.choose(*batch);
    const std::array<int64_t, kWordLength> word{
        wire_.call.number, wire_.call.trains, choice.number, choice.is_known};
    for (int64_t rank = 1; rank < wire_.shape.ranks; ++rank) {
      tell(bytes_of(word.data(), kWordLength, at::kCPU), {rank, tag});
    }
    return choice;
  }
  const auto bytes = at::empty({kWordLength * 8}, at::kByte);
  const auto work = wire_.receive(bytes, {0, tag});
  const auto where = [&] {
    return ddp::str(call_text(wire_.call), " of a pipeline, from stage 0 on ", wire_.name_of(0));
  };
  wire_.monitor->wait(*work, where, Peers::Some);
  std::vector<int64_t> words;
  append_words(bytes, words);
  const StageCall call{words[0], words[1] != 0};
  DDP_CHECK(
      call.number == wire_.call.number && call.trains == wire_.call.trains,
      "PipelineStage: expected a message of ", call_text(wire_.call), ", got one of ",
      call_text(call), " ", on_rank_text(*wire_.group),
      ". Call step() and eval() on all ranks, in the same order.");
  return {words[2], words[3] != 0};
}

void StreamedMessages::tell(const at::Tensor& bytes, const PipelineMessage& to) {
  told_.push_back({0, {wire_.send(bytes, to)}, {bytes}});
}

void StreamedMessages::begin_step(size_t step) {
  while (next_ < list_.batches.size() && list_.batches[next_].before == step) start(next_++);
}

void StreamedMessages::start(size_t number) {
  const auto& batch = list_.batches[number];
  if (!choice_.is_known) exchange_headers(batch);
  std::vector<P2POp> ops;
  started_.push_back({number, {}, {}});
  for (const auto& message : batch.messages) add(message, number, ops);
  if (ops.empty()) return;  // messages of undefined tensors
  started_.back().works =
      start_messages(ops, wire_.group, [text = text_of_batch(batch)] { return text; });
}

void StreamedMessages::add(const BatchedMessage& message, size_t number, std::vector<P2POp>& ops) {
  const auto peer = static_cast<int>(message.peer);
  auto& memory = started_.back().memory;
  if (message.sends) {
    const auto tensors = std::move(outgoing_.extract(message.step).mapped());
    const auto tag = static_cast<int>(list_.steps[message.step].send->tag);
    for (const auto& tensor : tensors) {
      if (!has_bytes(description_of(tensor))) continue;
      memory.push_back(bytes_of(tensor));
      ops.push_back(P2POp::send(memory.back(), peer, tag));
    }
    return;
  }
  const auto tag = static_cast<int>(list_.steps[message.step].receive->tag);
  StageMessage arriving{headers_->received.at(message.step), {}};
  for (const auto& description : arriving.header.tensors) {
    auto& tensor = arriving.tensors.emplace_back();
    if (!description.is_defined) continue;
    tensor = at::empty(description.sizes, at::device(wire_.device).dtype(description.dtype));
    if (!has_bytes(description)) continue;
    memory.push_back(tensor.view({-1}).view(at::kByte));
    ops.push_back(P2POp::recv(memory.back(), peer, tag));
  }
  arriving_.insert_or_assign(message.step, Arriving{std::move(arriving), number});
}

// Sends first: each host tells what it knows before it waits, so that hosts come to the batches of
// a time together.
void StreamedMessages::exchange_headers(const PipelineBatch& batch) {
  for (const auto& message : batch.messages) {
    if (!message.sends) continue;
    const auto& to = *list_.steps[message.step].send;
    for (const auto& part : parts_of(headers_->sent.at(message.step), at::kCPU)) tell(part, to);
  }
  for (const auto& message : batch.messages) {
    if (!message.sends) headers_->received[message.step] = receive_header(message);
  }
}

StageMessageHeader StreamedMessages::receive_header(const BatchedMessage& message) const {
  const auto& action = list_.steps[message.step].action;
  const auto& from = *list_.steps[message.step].receive;
  const auto where = [&] { return text_of_message(message); };
  std::vector<int64_t> words;
  const auto append = [&](int64_t count) {
    const auto bytes = at::empty({count * 8}, at::kByte);
    const auto work = wire_.receive(bytes, from);
    wire_.monitor->wait(*work, where, Peers::Some);
    append_words(bytes, words);
  };
  append(kHeaderWords);
  if (const auto rest = words_of_second_part(words); rest > 0) append(rest);
  auto header = header_of(words);
  check_header(
      header, {action.kind, wire_.stage_before(action), action.microbatch, false, wire_.call},
      on_rank_text(*wire_.group));
  return header;
}

StageMessage StreamedMessages::take(size_t step, WaitPoint /*where*/) {
  auto arriving = std::move(arriving_.extract(step).mapped());
  wait_for(arriving.batch);
  return std::move(arriving.message);
}

void StreamedMessages::wait_for(size_t number) {
  for (; !started_.empty() && started_.front().batch <= number; started_.pop_front()) {
    for (const auto& work : started_.front().works) work->wait();
  }
}

void StreamedMessages::send(size_t step, const Tensors& tensors, bool is_filler) {
  const auto& action = list_.steps[step].action;
  StageMessageHeader header{
      action.kind, wire_.stage_of(action), action.microbatch, is_filler, wire_.call};
  for (const auto& tensor : tensors) header.tensors.push_back(description_of(tensor));
  if (!choice_.is_known) {
    headers_->sent[step] = std::move(header);
  } else {
    const auto& known = headers_->sent.at(step);
    DDP_CHECK(
        are_alike(header.tensors, known.tensors), "PipelineStage: expected of ",
        action_text(action.kind, action.microbatch, header.stage), " ", full_text_of(known.tensors),
        ", as in an earlier call with a batch of the same sizes, got ",
        full_text_of(header.tensors), " ", on_rank_text(*wire_.group),
        ". Where what stages pass depends on more than the batch's sizes, give "
        "PipelineOptions().dynamic_shapes(true).");
  }
  outgoing_[step] = tensors;
}

void StreamedMessages::finish_all() {
  begin_step(list_.steps.size());
  if (!list_.batches.empty()) wait_for(list_.batches.size());
  // Hosts have taken these long ago: each took the word at the beginning, and headers in its list.
  const auto where = [&] { return ddp::str("ending ", call_text(wire_.call), " of a pipeline"); };
  for (; !told_.empty(); told_.pop_front()) {
    for (const auto& work : told_.front().works) wire_.monitor->wait(*work, where, Peers::Some);
  }
}

std::string StreamedMessages::text_of_message(const BatchedMessage& message) const {
  const auto& action = list_.steps[message.step].action;
  const auto what = action_text(action.kind, action.microbatch, wire_.stage_of(action));
  const auto& peer = wire_.name_of(message.peer);
  if (message.sends) return ddp::str(what, ", sending to ", peer);
  return ddp::str(what, ", from stage ", wire_.stage_before(action), " on ", peer);
}

// Names a message that arrives, if there is one: this rank waits for it.
std::string StreamedMessages::text_of_batch(const PipelineBatch& batch) const {
  for (const auto& message : batch.messages) {
    if (!message.sends) return text_of_message(message);
  }
  return text_of_message(batch.messages.front());
}

}  // namespace ddp
