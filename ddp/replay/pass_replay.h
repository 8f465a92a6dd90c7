#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/replayed_call.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

#include "replay/repeat_scope.h"
#include "replay/replay_verdict.h"
#include "replay/tensor_message.h"

namespace ddp {

/// Has the next rank compute a micro-batch once more, in one averaged pass of so many.
///
/// Each rank sends its batch to the next one, so that a pass checks all ranks at the cost of one
/// forward and backward pass.
class PassReplay {
 public:
  /// \param every  0: in no pass.
  explicit PassReplay(int64_t every);
  ~PassReplay();
  PassReplay(const PassReplay&) = delete;
  PassReplay& operator=(const PassReplay&) = delete;

  void restart();
  bool is_enabled() const { return every_ > 0; }
  /// Whether the coming averaged pass is one.
  bool is_due() const { return is_enabled() && (passes_ + 1) % every_ == 0; }

  /// A forward pass has arguments that can be sent.
  void offer() { is_offered_ = true; }
  /// Whether the forward pass that begins has them.
  bool take_offer() { return std::exchange(is_offered_, false); }

  /// Counts a forward pass that records gradients, also one in no_sync() or in eval().
  void count_forward() { ++forwards_; }

  /// Notes a forward pass that begins, in a pass that is due. The last one before the backward pass
  /// counts.
  ///
  /// \param parameters  whose gradients are averaged.
  void note_call(
      detail::CallArguments arguments, detail::RepeatCall repeat, const torch::nn::Module& module,
      const std::vector<at::Tensor>& parameters);
  /// Call it before the module's own forward.
  void enter_forward();
  /// Notes what that pass returned.
  void note_outputs(const std::vector<at::Tensor>& outputs);

  /// Call it when autograd is done, on every rank; counts the pass, and repeats the batch of the
  /// rank before where it is due.
  ///
  /// Gradients are compared where there was one forward pass since the last averaged one; of
  /// several, the outputs of the last one alone.
  ///
  /// Collective: yes, in a pass that is due. Blocks: host.
  void run(const ProcessGroup& group, GroupMonitor& monitor);

  /// The result of run().
  ReplayVerdict take_verdict() { return std::exchange(verdict_, {}); }
  /// Call it at the end of every averaged pass, also of one that is an error.
  void end_pass();

 private:
  struct Noted;
  struct Received;
  struct Exchange;

  static Received received_of(const std::string& message);
  bool exchange_texts(const ProcessGroup& group, GroupMonitor& monitor, Exchange& exchange);
  std::vector<std::pair<ReplayHashes, ReplayHashes>> repeated(
      int distance, const Exchange& exchange, const ProcessGroup& group, GroupMonitor& monitor);
  ReplayHashes own_hashes(bool with_gradients) const;
  ReplayHashes repeat(const Received& received, bool with_gradients) const;
  std::string message_text();

  const int64_t every_;
  int64_t passes_ = 0;
  int64_t forwards_ = 0;  // since the last averaged pass
  bool is_offered_ = false;
  std::unique_ptr<Noted> noted_;
  ReplayVerdict verdict_;
};

}  // namespace ddp
