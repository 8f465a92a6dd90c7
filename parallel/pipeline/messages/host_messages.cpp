#include "pipeline/messages/host_messages.h"

namespace ddp {

HostMessages::HostMessages(const StageWire& wire, const std::vector<PipelineStep>& steps)
    : wire_(wire), steps_(steps), forwards_(wire, expected('F')), backwards_(wire, expected('B')) {}

std::vector<ExpectedMessage> HostMessages::expected(char kind) const {
  std::vector<ExpectedMessage> expected;
  for (const auto& [action, receive, send] : steps_) {
    if (action.kind != kind || !receive) continue;
    expected.push_back({action, *receive, wire_.stage_before(action)});
  }
  return expected;
}

StageMessage HostMessages::take(size_t step, WaitPoint where) {
  return channel_of(steps_[step].action).in.take(where);
}

void HostMessages::send(size_t step, const Tensors& tensors, bool is_filler) {
  const auto& action = steps_[step].action;
  channel_of(action).out.send(
      action, *steps_[step].send, wire_.stage_of(action), tensors, is_filler);
}

void HostMessages::finish(const PipelineAction& action) { channel_of(action).out.finish(action); }

void HostMessages::finish_all() {
  forwards_.out.finish_all();
  backwards_.out.finish_all();
}

}  // namespace ddp
