#include "pipeline/schedule.h"

#include <algorithm>
#include <cstddef>

namespace ddp {
namespace {

/// How many micro-batches go through one chunk before the next chunk's turn. A round of fewer than
/// the ranks would leave some idle; so there are as many rounds as that allows, the larger first,
/// because the forwards ahead of the first backward are counted by the first round.
std::vector<int64_t> rounds_of(PipelineSchedule schedule, const PipelineShape& shape) {
  if (schedule != PipelineSchedule::Interleaved) return {shape.microbatches};
  const auto count = std::max<int64_t>(1, shape.microbatches / shape.ranks);
  std::vector<int64_t> rounds(static_cast<size_t>(count), shape.microbatches / count);
  for (int64_t i = 0; i < shape.microbatches % count; ++i) ++rounds[static_cast<size_t>(i)];
  return rounds;
}

/// The forwards of a rank in order, or its backwards, which go through the chunks the other way.
std::vector<PipelineAction> in_rounds(
    char kind, const std::vector<int64_t>& rounds, const PipelineShape& shape) {
  std::vector<PipelineAction> actions;
  int64_t first = 0;
  for (const auto size : rounds) {
    for (int64_t i = 0; i < shape.chunks; ++i) {
      const auto chunk = kind == 'F' ? i : shape.chunks - 1 - i;
      for (int64_t j = 0; j < size; ++j) actions.push_back({kind, chunk, first + j});
    }
    first += size;
  }
  return actions;
}

/// The forwards before the first turn of a forward and a backward.
int64_t warm_up(
    PipelineSchedule schedule, int64_t first_round, const PipelineShape& shape, int64_t rank) {
  const auto all = shape.chunks * shape.microbatches;
  const auto after = shape.ranks - 1 - rank;
  switch (schedule) {
    case PipelineSchedule::GPipe:
      return all;
    case PipelineSchedule::OneFOneB:
      return std::min(all, after);
    case PipelineSchedule::Interleaved:
      // Twice `after`, for a gradient comes back only after as many more forwards of others.
      return std::min(all, (shape.chunks - 1) * first_round + 2 * after);
  }
  return all;
}

/// Stage k's messages forward have the tag of stage k + 1, those backward of stage k - 1: the
/// receiver's chunk, which tells apart all that comes from one rank in one direction.
int64_t tag_of(char kind, int64_t receiving_chunk, int64_t microbatch, const PipelineShape& shape) {
  return 2 * (shape.microbatches * receiving_chunk + microbatch) + (kind == 'B' ? 1 : 0);
}

}  // namespace

std::vector<PipelineAction> pipeline_actions(
    PipelineSchedule schedule, const PipelineShape& shape, int64_t rank) {
  const auto rounds = rounds_of(schedule, shape);
  const auto forwards = in_rounds('F', rounds, shape);
  const auto backwards = in_rounds('B', rounds, shape);
  const auto ahead = static_cast<size_t>(warm_up(schedule, rounds.front(), shape, rank));

  std::vector<PipelineAction> actions(
      forwards.begin(), forwards.begin() + static_cast<int64_t>(ahead));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (ahead + i < forwards.size()) actions.push_back(forwards[ahead + i]);
    actions.push_back(backwards[i]);
  }
  return actions;
}

std::vector<PipelineStep> pipeline_steps(
    const std::vector<PipelineAction>& actions, const PipelineShape& shape, int64_t rank) {
  std::vector<PipelineStep> steps;
  for (const auto& action : actions) {
    const auto message = [&](int64_t other, int64_t receiver) -> std::optional<PipelineMessage> {
      if (shape.ranks == 1 || other < 0 || other >= shape.stages()) return {};
      const auto tag = tag_of(action.kind, receiver / shape.ranks, action.microbatch, shape);
      return PipelineMessage{other % shape.ranks, tag};
    };
    const auto stage = shape.stage_of(rank, action.chunk);
    const auto next = action.kind == 'F' ? stage + 1 : stage - 1;
    const auto previous = 2 * stage - next;
    steps.push_back({action, message(previous, stage), message(next, next)});
  }
  return steps;
}

std::string action_text(char kind, int64_t microbatch, int64_t stage) {
  return kind + std::to_string(microbatch) + " of stage " + std::to_string(stage);
}

std::string text_of(const PipelineAction& action, const PipelineShape& shape, int64_t rank) {
  return action_text(action.kind, action.microbatch, shape.stage_of(rank, action.chunk));
}

}  // namespace ddp
