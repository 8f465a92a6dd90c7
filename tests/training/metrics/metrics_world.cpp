// The program that metrics_files_test.py reads the files of: metrics_world FOLDER [FIRST_STEP]
#include <cmath>
#include <cstdlib>
#include <string>

#include <ddp/metrics_log.h>
#include <ddp/process_group.h>

namespace ddp_metrics_world {

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string folder = argv[1];
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  ddp::init_process_group();
  {
    ddp::Metrics metrics(ddp::MetricsOptions()
                             .tensorboard(folder)
                             .jsonl(folder + "/metrics.jsonl")
                             .prometheus_file(folder + "/metrics.prom"));
    // The mean of both ranks is step + 0.25.
    const double own = ddp::get_rank() == 0 ? -0.25 : 0.75;
    for (int step = first; step < first + 1000; ++step) {
      metrics.add("train/loss", step + own, step);
      metrics.add("\xC3\xA9tat \"\\", 1e-30, step);
      if (step % 100 == 0) metrics.add("odd", step % 200 == 0 ? NAN : -INFINITY, step);
    }
  }
  ddp::destroy_process_group();
  return 0;
}

}  // namespace ddp_metrics_world
