#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddp/pipeline_schedule.h>

namespace ddp {

/// A pipeline of ranks * chunks stages: stage k is chunk k / ranks of rank k % ranks, so messages
/// go to the next rank of a ring, or to the one before. All are at least 1.
struct PipelineShape {
  int64_t ranks = 1;
  int64_t chunks = 1;
  int64_t microbatches = 1;

  int64_t stages() const { return ranks * chunks; }
  int64_t stage_of(int64_t rank, int64_t chunk) const { return chunk * ranks + rank; }
};

/// The actions of a rank in a step, in order. Lists are a function of their arguments alone, so no
/// message is exchanged to agree on them; they equal PyTorch's where PyTorch has one.
///
/// \param schedule  OneFOneB needs one chunk: with more, ranks would wait for each other.
///
/// Cost: O(chunks * microbatches).
std::vector<PipelineAction> pipeline_actions(PipelineSchedule, const PipelineShape&, int64_t rank);

/// A message between two stages of different ranks. Of two messages from one rank to another in one
/// direction, the one that is sent first is received first; so streams without tags work, too.
struct PipelineMessage {
  int64_t peer;
  int64_t tag;  ///< Distinct among the messages of a step from one rank to another.
};

/// An action with its messages. A rank waits for what it receives before it computes, and does not
/// wait for what it sends: two ranks that waited for sends to each other would never receive.
struct PipelineStep {
  PipelineAction action;
  /// The activations of the stage before, or gradients of the one after. None on the first stage
  /// forward and the last one backward, or where this rank has that stage, too.
  std::optional<PipelineMessage> receive;
  /// Activations for the stage after, or gradients for the one before; none accordingly.
  std::optional<PipelineMessage> send;
};

/// `actions` of a rank with their messages.
std::vector<PipelineStep> pipeline_steps(
    const std::vector<PipelineAction>& actions, const PipelineShape&, int64_t rank);

/// "B2 of stage 1", for texts of errors.
std::string action_text(char kind, int64_t microbatch, int64_t stage);
std::string text_of(const PipelineAction&, const PipelineShape&, int64_t rank);

}  // namespace ddp
