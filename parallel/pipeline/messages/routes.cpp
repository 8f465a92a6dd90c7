#include "pipeline/messages/routes.h"

namespace ddp {

std::vector<MessageRoute> separate_routes(PipelineSchedule schedule, const PipelineShape& shape) {
  if (shape.ranks == 1) return {};
  if (shape.chunks > 1) return {{'F', true}, {'F', false}, {'B', false}, {'B', true}};
  // All activations have arrived before the first gradient is sent.
  if (schedule == PipelineSchedule::GPipe) return {};
  return {{'F', true}, {'B', false}};
}

}  // namespace ddp
