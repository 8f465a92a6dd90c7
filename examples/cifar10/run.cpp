#include "run.h"

#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <ddp/process_group.h>
#include <torch/utils.h>

#include "../common/checkpoints.h"
#include "../common/data/cifar.h"
#include "../common/leave_on_signal.h"
#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/rank_device.h"
#include "../common/reporting.h"
#include "training.h"

namespace cifar10 {
namespace {

struct Data {
  examples::LabeledImages train;
  examples::LabeledImages test;
};

Data prepare(const Options& options) {
  if (ddp::is_main() && !options.save.empty()) examples::check_can_write("--save", options.save);
  if (ddp::is_main() && !options.trace.empty()) examples::check_can_write("--trace", options.trace);
  return {
      examples::read_cifar10(options.data, "train"), examples::read_cifar10(options.data, "test")};
}

Net make_net(const Options& options) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  auto shape = net_options(options.model);
  shape.sync_batch_norm = options.sync_batch_norm;
  Net net(shape);
  net->to(examples::rank_device(options.backend));
  return net;
}

}  // namespace

void run(const Options& options, examples::Progress& progress) {
  examples::LeaveOnSignal leaving(options.leave_on_signal);
  Data data;
  examples::on_all_ranks([&] { data = prepare(options); });
  const int ranks = ddp::get_world_size();
  progress.line(c10::str(
      "training ", options.model, " on ", data.train.labels.size(0), " images, testing on ",
      data.test.labels.size(0), "; ", ranks, ranks == 1 ? " rank" : " ranks", ", batch ",
      options.batch_size, " per rank"));

  Training training(options, make_net(options), std::move(data.train));
  auto& checkpointer = training.checkpointer();
  int64_t epoch =
      examples::begin_run(checkpointer, options.checkpoint, options.resume, progress, "epoch");
  if (training.steps_of_epoch() > 0) {
    progress.line(c10::str("and after step ", training.steps_of_epoch(), " of epoch ", epoch + 1));
  }

  auto tested = sum_over_ranks(training.evaluate(data.test));
  for (; epoch < options.epochs; ++epoch) {
    const auto start = std::chrono::steady_clock::now();
    const auto label = c10::str("epoch ", epoch + 1, "/", options.epochs);
    const auto trained = sum_over_ranks(training.epoch(epoch, [&](int64_t done, int64_t total) {
      progress.step(label, done, total);
      leaving.check(
          checkpointer, epoch, c10::str("step ", done, " of epoch ", epoch + 1), progress);
    }));
    tested = sum_over_ranks(training.evaluate(data.test));
    report_epoch(epoch, options.epochs, trained, tested, start, progress);
    if (checkpointer) checkpointer->save(epoch + 1);
  }

  if (checkpointer) checkpointer->wait();
  training.model()->check_replicas();
  report_equal_replicas(progress);
  if (!options.save.empty()) {
    examples::on_all_ranks([&] {
      if (ddp::is_main()) training.save(options.save);
    });
    progress.line("saved: " + options.save);
  }
  write_trace(options.trace, training.model()->stats(), progress);
  progress.line("steps: " + ddp::summary(training.model()->stats()));
  progress.line("test accuracy: " + tested.accuracy());
}

}  // namespace cifar10
