#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/collectives.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/batches.h"
#include "pipeline/messages/host_messages.h"
#include "pipeline/messages/message_header.h"
#include "pipeline/messages/wire.h"
#include "pipeline/schedule.h"

namespace ddp {

/// The list of a rank for a step() or an eval().
struct PipelineList {
  std::vector<PipelineStep> steps;
  std::vector<PipelineBatch> batches;  // where messages go on streams
};

/// The headers of a call's messages, by step of the list.
struct CallHeaders {
  std::map<size_t, StageMessageHeader> received, sent;
};

/// The headers of earlier calls, by the number that the first stage has given to calls with a batch
/// of some sizes. The same numbers on all ranks.
class KnownHeaders {
 public:
  static constexpr int64_t kMost = 64;  // of a rank; beyond, the oldest is learned once more

  struct Choice {
    int64_t number = 0;
    bool is_known = false;
  };

  /// For the first stage.
  ///
  /// \param batch  describes it; "": not to be known again.
  Choice choose(const std::string& batch);
  /// \return  the headers of the number; empty ones unless they are known.
  CallHeaders& of(const Choice& choice);

 private:
  std::map<std::string, int64_t> numbers_;      // on the first stage
  std::array<std::string, kMost> batches_;      // the same
  std::array<CallHeaders, kMost + 1> headers_;  // the last one's is not to be known again
  int64_t next_ = 0;
};

/// Messages in batches over one stream, for which the host does not wait.
///
/// The sizes of tensors are agreed on in the first call with a batch of some sizes: by headers that
/// hosts send each other, when they start a batch. From then on a call has no headers. The first
/// stage knows the batch before it sends anything, and its host tells the others' at the beginning
/// of each call which of the known ones it is like, or that it is new; so a last batch of fewer
/// rows works. Without such a word no rank could know that this call's batch is not like the one
/// before. Hosts wait there for the first stage's host to begin the call, and not for a device.
class StreamedMessages final : public StageMessages {
 public:
  /// \param batch  of the first stage, as KnownHeaders::choose(); unset on others.
  ///
  /// Collective: yes, over the stages. Blocks: host, for the first stage's.
  StreamedMessages(
      const StageWire& wire, const PipelineList& list, KnownHeaders& known,
      const std::optional<std::string>& batch);

  void begin_step(size_t step) override;
  StageMessage take(size_t step, WaitPoint where) override;
  /// \throws c10::Error  for tensors of other sizes than are known.
  void send(size_t step, const Tensors& tensors, bool is_filler) override;
  void finish_all() override;

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// A batch that has been started, with the memory that it reads or writes.
  struct Started {
    size_t batch;
    std::vector<WorkPtr> works;
    Tensors memory;
  };
  struct Arriving {
    StageMessage message;
    size_t batch;
  };

  KnownHeaders::Choice agree(KnownHeaders& known, const std::optional<std::string>& batch);
  void tell(const at::Tensor& bytes, const PipelineMessage& to);
  void exchange_headers(const PipelineBatch& batch);
  StageMessageHeader receive_header(const BatchedMessage& message) const;
  void start(size_t number);
  /// Adds the message's tensors to the batch.
  void add(const BatchedMessage& message, size_t number, std::vector<P2POp>& ops);
  /// Has the stream wait for all batches up to this one, which end in this order; their memory is
  /// free for what follows on the stream.
  void wait_for(size_t number);
  std::string text_of_message(const BatchedMessage& message) const;
  std::string text_of_batch(const PipelineBatch& batch) const;

  const StageWire& wire_;
  const PipelineList& list_;
  KnownHeaders::Choice choice_;
  CallHeaders* headers_ = nullptr;      // of the choice
  size_t next_ = 0;                     // batch to start
  std::map<size_t, Tensors> outgoing_;  // by step, until their batch
  std::map<size_t, Arriving> arriving_;
  std::deque<Started> started_;  // and not waited for
  std::deque<Started> told_;     // to other hosts
};

}  // namespace ddp
