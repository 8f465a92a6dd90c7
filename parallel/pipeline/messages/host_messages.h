#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pipeline/messages/inbox.h"
#include "pipeline/messages/outbox.h"
#include "pipeline/messages/wire.h"
#include "pipeline/schedule.h"

namespace ddp {

/// The messages of a rank in one step() or eval(), by the steps of its list.
class StageMessages {
 public:
  using Tensors = std::vector<at::Tensor>;

  virtual ~StageMessages() = default;

  /// Called before the action of each step, in order.
  virtual void begin_step(size_t /*step*/) {}
  /// The message that the step needs.
  ///
  /// \param where  the action, for texts.
  virtual StageMessage take(size_t step, WaitPoint where) = 0;
  /// Starts to send what the step's action made, in this call or in the next begin_step().
  ///
  /// \param is_filler  as in the header.
  virtual void send(size_t step, const Tensors& tensors, bool is_filler) = 0;
  /// Drops the memory of what an earlier action sent: another message says that it has arrived.
  virtual void finish(const PipelineAction& /*action*/) {}
  /// Called after the last step.
  virtual void finish_all() = 0;
};

/// Messages with a header each, which the host waits for: over backends that have no streams.
class HostMessages final : public StageMessages {
 public:
  /// \param wire  lives longer. \param steps  the same.
  HostMessages(const StageWire& wire, const std::vector<PipelineStep>& steps);

  StageMessage take(size_t step, WaitPoint where) override;
  void send(size_t step, const Tensors& tensors, bool is_filler) override;
  void finish(const PipelineAction& action) override;
  void finish_all() override;

 private:
  /// The messages of one direction.
  struct Channel {
    Channel(const StageWire& wire, std::vector<ExpectedMessage> expected)
        : in(wire, std::move(expected)), out(wire) {}
    StageInbox in;
    StageOutbox out;
  };

  std::vector<ExpectedMessage> expected(char kind) const;
  Channel& channel_of(const PipelineAction& action) {
    return action.kind == 'F' ? forwards_ : backwards_;
  }

  const StageWire& wire_;
  const std::vector<PipelineStep>& steps_;
  Channel forwards_, backwards_;
};

}  // namespace ddp
