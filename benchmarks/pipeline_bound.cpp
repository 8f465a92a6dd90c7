// How long a step of a pipeline takes at least by its schedule's list, by clocks and with messages
// that take time: pipeline_bound SCHEDULE RANKS MICROBATCHES FORWARD_MS MESSAGE_MS
//   SCHEDULE    as of ddp_bench: gpipe, 1f1b, eager or interleaved
//   FORWARD_MS  of a micro-batch in one stage; its backward takes twice as long
//   MESSAGE_MS  of one message, of which a rank sends another one at a time
#include <cstdint>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"

namespace {

ddp::PipelineSchedule schedule_of(const std::string& name) {
  if (name == "gpipe") return ddp::PipelineSchedule::GPipe;
  if (name == "1f1b") return ddp::PipelineSchedule::OneFOneB;
  if (name == "eager" || name == "interleaved") return ddp::PipelineSchedule::Interleaved;
  throw std::invalid_argument("expected gpipe, 1f1b, eager or interleaved, got " + name);
}

double bound(int argc, char** argv) {
  if (argc != 6) throw std::invalid_argument("expected 5 arguments");
  const std::string name = argv[1];
  const auto schedule = schedule_of(name);
  const int64_t chunks = name == "interleaved" ? 2 : 1;
  const ddp::PipelineShape shape{std::stoll(argv[2]), chunks, std::stoll(argv[3])};
  std::vector<std::vector<ddp::PipelineStep>> steps;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    steps.push_back(pipeline_steps(pipeline_actions(schedule, shape, rank), shape, rank));
  }
  const double forward = std::stod(argv[4]), message = std::stod(argv[5]);
  const auto run = simulate(shape, steps, {forward, 2 * forward, message});
  if (!run.fault.empty()) throw std::logic_error(run.fault);
  return run.time;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::cout << bound(argc, argv) << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "pipeline_bound: " << error.what() << "\n";
    return 2;
  }
}
