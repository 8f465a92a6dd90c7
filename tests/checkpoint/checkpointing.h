// A training run with every kind of state that a checkpoint holds, for the tests of Checkpointer.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace ddp::testing {

using ddp::testing::names_in;
using ddp::testing::TemporaryFolder;

/// A value of a user's own class.
struct Counter {
  int64_t count = 0;
  bool refuses = false;

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("count", c10::IValue(count));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("count", value);
    count = value.toInt();
    TORCH_CHECK(!refuses, "Counter: refuses");
  }
};

/// One rank's run: without dropout, because ranks that are threads share one generator.
class TrainingRun {
 public:
  static constexpr size_t kSamples = 40;
  static constexpr size_t kBatch = 2;

  explicit TrainingRun(const Rank& self)
      : rank(self.rank),
        net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 2)),
        model(filled(net), DistributedDataParallelOptions().process_group(self.group)),
        optimizer(model->parameters(), torch::optim::AdamOptions(0.05).amsgrad(true)),
        scheduler(optimizer, /*step_size=*/3, /*gamma=*/0.5),
        plateau(optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, /*patience=*/1),
        sampler(
            kSamples, DistributedSamplerOptions().num_replicas(self.size).rank(self.rank).seed(7)),
        generator(at::make_generator<at::CPUGeneratorImpl>(1 + self.rank)) {}

  /// Takes the next samples, trains on them and returns their numbers.
  std::vector<size_t> step() {
    auto indices = sampler.next(kBatch);
    if (!indices) {
      sampler.set_epoch(sampler.epoch() + 1);
      sampler.reset();
      indices = sampler.next(kBatch);
    }
    std::vector<float> numbers(indices->begin(), indices->end());
    const auto x =
        torch::sin(torch::tensor(numbers).unsqueeze(1) * torch::arange(1.0, 5.0, torch::kFloat));
    optimizer.zero_grad();
    const auto noise = torch::randn({2}, generator) * 0.01;
    const auto loss = (model->forward(x) - x.narrow(1, 0, 2) + noise).pow(2).mean();
    loss.backward();
    optimizer.step();
    scheduler.step();
    ++counter.count;
    plateau.step(static_cast<float>(counter.count % 5));  // the same on all ranks
    ++samples;
    return *indices;
  }

  void add_to(Checkpointer& checkpointer) {
    checkpointer.add("model", model).add("optimizer", optimizer).add("scheduler", scheduler);
    checkpointer.add("plateau", plateau).add("sampler", sampler).add("counter", counter);
    checkpointer.add_per_rank("generator", generator).add_per_rank("samples", samples);
  }

  /// All state that decides how the run continues, as numbers.
  std::vector<at::Tensor> values() {
    auto all = state_of(*net);
    for (const auto& p : net->parameters()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& state = static_cast<torch::optim::AdamParamState&>(*found->second);
      all.push_back(state.exp_avg().clone());
      all.push_back(state.exp_avg_sq().clone());
      all.push_back(state.max_exp_avg_sq().clone());
      all.push_back(torch::tensor(state.step()));
    }
    const auto lr = optimizer.param_groups().front().options().get_lr();
    all.push_back(torch::tensor({lr, static_cast<double>(counter.count), double(samples)}));
    return all;
  }

  int rank;
  torch::nn::Sequential net;
  DistributedDataParallel<torch::nn::Sequential> model;
  torch::optim::Adam optimizer;
  torch::optim::StepLR scheduler;
  torch::optim::ReduceLROnPlateauScheduler plateau;
  DistributedSampler sampler;
  at::Generator generator;
  Counter counter;
  int64_t samples = 0;

 private:
  // Fills the parameters with equal values on every rank, without the generator that threads share.
  static torch::nn::Sequential filled(torch::nn::Sequential net) {
    set_waves(*net, {1, 1, 0});
    return net;
  }
};

inline CheckpointerOptions options_of(const Rank& self) {
  return CheckpointerOptions().process_group(self.group);
}

/// Makes runs of `steps` steps on `size` ranks and saves a checkpoint after each of `saves`.
inline void save_checkpoints(
    const std::string& folder, int size, const std::vector<int64_t>& saves) {
  run_ranks<int>(size, [&](const Rank& self) {
    TrainingRun run(self);
    Checkpointer checkpointer(folder, options_of(self));
    run.add_to(checkpointer);
    for (int64_t step = 1; step <= saves.back(); ++step) {
      run.step();
      if (std::find(saves.begin(), saves.end(), step) != saves.end()) checkpointer.save(step);
    }
    checkpointer.wait();
    return 0;
  });
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

}  // namespace ddp::testing
