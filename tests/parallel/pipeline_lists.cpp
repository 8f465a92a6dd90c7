// Prints the lists of all small pipelines, a line a rank, as PyTorch names their actions ("1F2":
// the forward of micro-batch 2 on stage 1): SCHEDULE RANKS CHUNKS MICROBATCHES RANK: ACTIONS.
#include <cstdint>
#include <iostream>
#include <string>

#include "parallel/pipeline/schedule.h"

namespace {

void print(
    const std::string& name, ddp::PipelineSchedule schedule, const ddp::PipelineShape& shape) {
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    std::cout << name << ' ' << shape.ranks << ' ' << shape.chunks << ' ' << shape.microbatches
              << ' ' << rank << ':';
    for (const auto& action : ddp::pipeline_actions(schedule, shape, rank)) {
      std::cout << ' ' << shape.stage_of(rank, action.chunk) << action.kind << action.microbatch;
    }
    std::cout << '\n';
  }
}

}  // namespace

int main() {
  for (int64_t ranks = 1; ranks <= 6; ++ranks) {
    for (int64_t microbatches = 1; microbatches <= 12; ++microbatches) {
      print("GPipe", ddp::PipelineSchedule::GPipe, {ranks, 1, microbatches});
      print("1F1B", ddp::PipelineSchedule::OneFOneB, {ranks, 1, microbatches});
      for (int64_t chunks = 1; chunks <= 3; ++chunks) {
        print("Interleaved1F1B", ddp::PipelineSchedule::Interleaved, {ranks, chunks, microbatches});
      }
    }
  }
}
