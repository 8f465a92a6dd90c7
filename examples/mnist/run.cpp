#include "run.h"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <ddp/checkpointer.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <ddp/reduction_stats.h>
#include <ddp/sampler.h>
#include <torch/data/dataloader.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include "../common/checkpoints.h"
#include "../common/data/idx.h"
#include "../common/leave_on_signal.h"
#include "../common/on_all_ranks.h"
#include "../common/output_file.h"
#include "../common/rank_device.h"
#include "../common/reporting.h"
#include "state_file.h"
#include "training.h"

namespace mnist {
namespace {

using Loader = torch::data::StatelessDataLoader<examples::ImageDataset, ddp::DistributedSampler>;

struct Data {
  examples::LabeledImages train;
  examples::LabeledImages test;
};

Data prepare(const Options& options, int rank) {
  if (rank == 0 && !options.save.empty()) examples::check_can_write("--save", options.save);
  if (rank == 0 && !options.trace.empty()) examples::check_can_write("--trace", options.trace);
  return {examples::read_mnist(options.data, "train"), examples::read_mnist(options.data, "t10k")};
}

Model make_model(const Options& options, c10::Device device, int rank) {
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  Net net;
  net->to(device);
  auto cap = options.bucket_cap_mb;
  if (options.tune_bucket_cap) cap = ddp::kTuneBucketCap;
  Model model(net, ddp::DistributedDataParallelOptions().bucket_cap_mb(cap));
  // From here on the generator is only used by dropout, which every rank draws for itself.
  torch::manual_seed(static_cast<uint64_t>(options.seed) + 1 + rank);
  return model;
}

std::string describe(const Options& options, const Data& data, int world_size, c10::Device device) {
  const auto& images = data.train.images;
  return c10::str(
      "training on ", images.size(0), " images of ", images.size(1), "x", images.size(2),
      ", testing on ", data.test.images.size(0), "; ", world_size,
      world_size == 1 ? " rank, " : " ranks, ", device, ", batch ", options.batch_size,
      " per rank");
}

/// Trains through all epochs and holds the state that lives that long.
class Training {
 public:
  Training(const Options& options, Model model, examples::ImageDataset dataset)
      : options_(options),
        model_(std::move(model)),
        sampler_(*dataset.size(), ddp::DistributedSamplerOptions().seed(options.seed)),
        loader_(torch::data::make_data_loader(std::move(dataset), sampler_, options.batch_size)),
        optimizer_(model_->parameters(), options.lr),
        steps_per_epoch_(
            static_cast<int64_t>((sampler_.size() + options.batch_size - 1) / options.batch_size)) {
    if (options.checkpoint.empty()) return;
    checkpointer_.emplace(
        options.checkpoint, ddp::CheckpointerOptions().every_steps(options.checkpoint_every));
    checkpointer_->add("model", model_).add("optimizer", optimizer_).add("sampler", sampler_);
    checkpointer_->add_per_rank("tally", tally_);
  }

  /// With --resume, continues from the last checkpoint.
  void begin(examples::Progress& progress) {
    step_ = examples::begin_run(checkpointer_, options_.checkpoint, options_.resume, progress);
  }

  /// \return the epoch of the next step, or the epoch that the last step ended.
  int64_t epoch() const { return static_cast<int64_t>(sampler_.epoch()); }

  /// \return the tally of this rank's samples.
  Tally train_epoch(int64_t epoch, examples::LeaveOnSignal& leaving, examples::Progress& progress) {
    model_->train();
    sampler_.set_epoch(static_cast<size_t>(epoch));
    const auto label = c10::str("epoch ", epoch + 1, "/", options_.epochs);
    for (auto& batch : *loader_) {
      decay_learning_rate();
      tally_ += train_step(model_, optimizer_, batch);
      ++step_;
      progress.step(label, step_ - epoch * steps_per_epoch_, steps_per_epoch_);
      if (checkpointer_) checkpointer_->maybe_save(step_);
      leaving.check(checkpointer_, step_, c10::str("step ", step_), progress);
    }
    return std::exchange(tally_, {});
  }

  /// Returns once the last checkpoint is on the disk.
  void finish() {
    if (checkpointer_) checkpointer_->wait();
  }

 private:
  void decay_learning_rate() {
    const auto total = static_cast<double>(options_.epochs * steps_per_epoch_);
    const double lr = options_.lr * (1.0 - static_cast<double>(step_) / total);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(lr);
  }

  const Options& options_;
  Model model_;
  ddp::DistributedSampler sampler_;
  std::unique_ptr<Loader> loader_;
  torch::optim::Adam optimizer_;
  int64_t steps_per_epoch_;
  int64_t step_ = 0;  // done so far, in all epochs
  Tally tally_;       // of the current epoch
  // After the members that it saves, so that its destructor finishes the last save before theirs.
  std::optional<ddp::Checkpointer> checkpointer_;
};

}  // namespace

void run(const Options& options, examples::Progress& progress) {
  const int rank = ddp::get_rank();
  const int world_size = ddp::get_world_size();
  const auto device = examples::rank_device(options.backend);
  if (options.threads > 0) at::set_num_threads(options.threads);
  examples::LeaveOnSignal leaving(options.leave_on_signal);

  Data data;
  examples::on_all_ranks([&] { data = prepare(options, rank); });
  progress.line(describe(options, data, world_size, device));
  const auto pixels = examples::measure_pixels(data.train.images);
  examples::ImageDataset test(data.test, pixels);
  Model model = make_model(options, device, rank);
  Training training(options, model, examples::ImageDataset(data.train, pixels));

  training.begin(progress);
  Tally tested;
  for (int64_t epoch = training.epoch(); epoch < options.epochs; ++epoch) {
    const auto start = std::chrono::steady_clock::now();
    const auto trained = sum_over_ranks(training.train_epoch(epoch, leaving, progress));
    tested = sum_over_ranks(evaluate(model->module(), test, rank, world_size));
    report_epoch(epoch, options.epochs, trained, tested, start, progress);
  }

  training.finish();
  model->check_replicas();
  examples::report_equal_replicas(progress);
  if (!options.save.empty()) {
    examples::on_all_ranks([&] {
      if (rank == 0) save(model->module(), options.save);
    });
    progress.line("saved: " + options.save);
  }
  examples::write_trace(options.trace, model->stats(), progress);
  progress.line("steps: " + ddp::summary(model->stats()));
  progress.line("test accuracy: " + tested.accuracy());
}

}  // namespace mnist
