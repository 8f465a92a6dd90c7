#include "reporting.h"

#include <cstdio>

#include <c10/util/StringUtil.h>
#include <ddp/process_group.h>

#include "on_all_ranks.h"

namespace examples {

void report_epoch(
    int64_t epoch, int64_t epochs, const Tally& trained, const Tally& tested,
    std::chrono::steady_clock::time_point start, Progress& progress) {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  char line[160];
  std::snprintf(
      line, sizeof line, "epoch %lld/%lld: train loss %.4f, test loss %.4f, accuracy %s, %.1f s",
      static_cast<long long>(epoch + 1), static_cast<long long>(epochs), trained.mean_loss(),
      tested.mean_loss(), tested.accuracy().c_str(), seconds.count());
  progress.line(line);
}

void report_equal_replicas(Progress& progress) {
  const auto ranks = ddp::get_world_size();
  progress.line(c10::str("parameters: bitwise equal on ", ranks, ranks == 1 ? " rank" : " ranks"));
}

void write_trace(const std::string& path, const ddp::ReductionStats& own, Progress& progress) {
  if (path.empty()) return;
  const auto stats = ddp::all_gather_stats(own);
  on_all_ranks([&] {
    if (ddp::is_main()) ddp::write_trace(path, stats);
  });
  progress.line("trace: " + path);
}

}  // namespace examples
