// A sharded optimizer whose state is in a file, compared with one whose state is in memory.
#include <ddp/checkpointer.h>
#include <ddp/collectives.h>
#include <ddp/grad_scaler.h>
#include <ddp/internal/zero_shards.h>
#include <ddp/optim.h>
#include <ddp/zero.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/archives.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/regroup.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp::offload_test {

using namespace testing;
using torch::optim::OptimizerParamGroup;

using Sequential = torch::nn::Sequential;
using Tensors = std::vector<at::Tensor>;
using Zero = ZeroRedundancyOptimizerBase;
using MakeZero =
    std::function<std::unique_ptr<Zero>(DistributedDataParallel<Sequential>&, const ZeroOptions&)>;

/// An optimizer of two groups, the second with a rate of its own.
template <typename Optim, typename Options>
MakeZero zero_of(const Options& options) {
  return [options](DistributedDataParallel<Sequential>& model, const ZeroOptions& zero) {
    const auto all = model->parameters();
    const std::vector<at::Tensor> first(all.begin(), all.begin() + 1);
    const std::vector<at::Tensor> second(all.begin() + 1, all.end());
    std::vector<OptimizerParamGroup> groups{
        OptimizerParamGroup(first), OptimizerParamGroup(second)};
    groups[1].set_options(std::make_unique<Options>(options));
    groups[1].options().set_lr(0.01);
    return std::make_unique<ZeroRedundancyOptimizer<Optim>>(model, groups, options, zero);
  };
}

MakeZero zero_by_name(const std::string& name) {
  using namespace torch::optim;
  if (name == "Adam") return zero_of<Adam>(AdamOptions(0.02).amsgrad(true));
  if (name == "AdamW") return zero_of<AdamW>(AdamWOptions(0.02));
  if (name == "Adagrad") {
    return zero_of<Adagrad>(AdagradOptions(0.02).initial_accumulator_value(0.5));
  }
  if (name == "RMSprop") return zero_of<RMSprop>(RMSpropOptions(0.02).centered(true));
  if (name == "SGD") return zero_of<SGD>(SGDOptions(0.02).momentum(0.9));
  if (name == "SGD without a state") return zero_of<SGD>(SGDOptions(0.02));
  if (name == "fused SGD") return zero_of<optim::SGD>(SGDOptions(0.02).momentum(0.9));
  if (name == "fused Adagrad") return zero_of<optim::Adagrad>(AdagradOptions(0.02));
  if (name == "fused Adam") return zero_of<optim::Adam>(AdamOptions(0.02));
  return zero_of<optim::AdamW>(AdamWOptions(0.02).amsgrad(true));
}

/// One rank's run of a net.
struct OffloadRun {
  OffloadRun(const Rank& self, const MakeZero& make, const ZeroOptions& options, int64_t width = 13)
      : rank(self.rank),
        inputs(width),
        net(torch::nn::Linear(width, 1001), torch::nn::Tanh(), torch::nn::Linear(1001, 3)),
        model(nullptr) {
    set_waves(*net, {1, 1, 0, 0.05});
    model = DistributedDataParallel<Sequential>(
        net, DistributedDataParallelOptions()
                 .process_group(self.group)
                 .bucket_cap_mb(0.01)
                 .check_inputs(false));
    optimizer = make(model, options);
  }

  at::Tensor loss(int64_t step) {
    const auto steps = static_cast<double>(step + 1 + rank);
    const auto x = torch::cos(torch::arange(2.0 * inputs).view({2, inputs}) * steps);
    return model->forward(x).square().mean();
  }

  void train(int64_t first, int64_t end) {
    for (auto step = first; step < end; ++step) {
      ddp::zero_grad(*optimizer);
      loss(step).backward();
      optimizer->step();
    }
  }

  int rank;
  int64_t inputs;
  Sequential net;
  DistributedDataParallel<Sequential> model;
  std::unique_ptr<Zero> optimizer;
};

/// Rank 0's tensors after `train`.
Tensors after(
    int world, const std::string& name, const ZeroOptions& options,
    const std::function<void(OffloadRun&, const Rank&)>& train, int64_t width = 13) {
  return run_ranks<Tensors>(world, [&](const Rank& self) {
    OffloadRun run(self, zero_by_name(name), options, width);
    train(run, self);
    return copies_of(run.net->parameters());
  })[0];
}

ZeroOptions in_file(ZeroOptions options, const TemporaryFolder& folder) {
  return options.offload_file(folder.file("state"));
}

/// The whole state of AdamW.
Tensors states_of(const OffloadRun& run) {
  const auto whole = run.optimizer->consolidated();
  Tensors states;
  for (const auto& p : run.net->parameters()) {
    const auto& state = static_cast<const torch::optim::AdamWParamState&>(
        *whole->state().at(p.unsafeGetTensorImpl()));
    states.push_back(state.exp_avg().clone());
    states.push_back(state.exp_avg_sq().clone());
    states.push_back(torch::tensor(state.step()));
  }
  return states;
}

}  // namespace ddp::offload_test

namespace ddp {

using namespace offload_test;

TEST_CASE("a state in a file steps as one in memory", "[zero][offload][ranks]") {
  const std::string name = GENERATE(
      "Adam", "AdamW", "Adagrad", "RMSprop", "SGD", "SGD without a state", "fused SGD",
      "fused Adagrad", "fused Adam", "fused AdamW");
  const auto [world, stage, overlap] =
      GENERATE(table<int, int, bool>({{1, 1, false}, {2, 2, false}, {3, 1, false}, {3, 2, true}}));
  const TemporaryFolder folder;
  const auto options = ZeroOptions().stage(stage).overlap(overlap);
  size_t files = 0;
  const auto train = [&](OffloadRun& run, const Rank&) {
    run.train(0, 4);
    files += names_in(folder.path()).size();
  };
  CAPTURE(name, world, stage, overlap);
  const auto expected = after(world, name, options, train);
  CHECK(all_equal(after(world, name, in_file(options, folder), train), expected));
  CHECK(files == 0);  // they have no names
}

TEST_CASE("pieces that are cut into windows step to the same bits", "[zero][offload][ranks]") {
  const int stage = GENERATE(1, 2);
  const std::string name = GENERATE("fused AdamW", "Adagrad");
  const int world = GENERATE(1, 2);
  const TemporaryFolder folder;
  const auto options = ZeroOptions().stage(stage);
  const auto train = [](OffloadRun& run, const Rank&) {
    for (int64_t step = 0; step < 3; ++step) {
      ddp::zero_grad(*run.optimizer);
      run.loss(step).backward();
      clip_grad_norm_(*run.optimizer, 0.1);
      run.optimizer->step();
    }
  };
  constexpr int64_t kWidth = 2500;  // 2.5 million parameters in a layer
  CHECK(all_equal(
      after(world, name, in_file(options, folder), train, kWidth),
      after(world, name, options, train, kWidth)));
}

TEST_CASE("clipping, a scaler and accumulation work with a file", "[zero][offload][ranks]") {
  const int stage = GENERATE(1, 2);
  const int world = GENERATE(1, 2, 3);
  const TemporaryFolder folder;
  const auto train = [](OffloadRun& run, const Rank&) {
    GradScaler scaler(GradScalerOptions().init_scale(1024).growth_interval(2));
    for (int64_t step = 0; step < 5; ++step) {
      ddp::zero_grad(*run.optimizer);
      {
        const auto guard = run.model->no_sync();
        scaler.scale(run.loss(2 * step)).backward();
      }
      auto loss = run.loss(2 * step + 1);
      if (step == 3) loss = loss * std::numeric_limits<double>::infinity();  // a skipped step
      scaler.scale(loss).backward();
      scaler.unscale_(*run.optimizer);
      clip_grad_norm_(*run.optimizer, 0.1);
      scaler.step(*run.optimizer);
      scaler.update();
    }
  };
  const auto options = ZeroOptions().stage(stage);
  CHECK(all_equal(
      after(world, "fused AdamW", in_file(options, folder), train),
      after(world, "fused AdamW", options, train)));
}

TEST_CASE("checkpoints load with and without a file", "[zero][offload][ranks]") {
  const std::string name = GENERATE("fused AdamW", "SGD", "RMSprop", "Adagrad");
  const auto [stage, saves_in_file, loads_in_file, loading_world] = GENERATE(
      table<int, bool, bool, int>({{1, true, false, 2}, {2, false, true, 3}, {1, true, true, 1}}));
  CAPTURE(name, stage, saves_in_file, loads_in_file);
  const TemporaryFolder folder, checkpoints;
  const auto options = [&, stage = stage](bool has_file) {
    const auto plain = ZeroOptions().stage(stage);
    return has_file ? in_file(plain, folder) : plain;
  };
  // All ranks have the same data, so that averages do not depend on their number.
  const auto resumed = [&](bool has_file, int world) {
    return run_ranks<Tensors>(world, [&](const Rank& self) {
      OffloadRun run({0, self.size, self.group, self.store}, zero_by_name(name), options(has_file));
      run.train(7, 9);  // a state that the loaded one replaces
      Checkpointer checkpointer(
          checkpoints.path(), CheckpointerOptions().process_group(self.group));
      checkpointer.add("model", run.model).add("optimizer", *run.optimizer);
      const auto step = checkpointer.load_latest().value();
      run.train(step, step + 3);
      return copies_of(run.net->parameters());
    })[0];
  };
  run_ranks<int>(2, [&, saves_in_file = saves_in_file](const Rank& self) {
    OffloadRun run(
        {0, self.size, self.group, self.store}, zero_by_name(name), options(saves_in_file));
    run.train(0, 3);
    Checkpointer checkpointer(checkpoints.path(), CheckpointerOptions().process_group(self.group));
    checkpointer.add("model", run.model).add("optimizer", *run.optimizer);
    checkpointer.save(3);
    return 0;
  });
  const auto expected = resumed(!loads_in_file, 2);
  const auto got = resumed(loads_in_file, loading_world);
  CHECK(largest_difference(got, expected) < (loading_world == 2 ? 1e-30 : 1e-6));
}

TEST_CASE("ranks take pieces of states in files", "[zero][offload][ranks]") {
  const TemporaryFolder folder;
  const bool has_file = GENERATE(false, true);
  const auto taken = run_ranks<int>(2, [&](const Rank& self) {
    const auto options = has_file ? in_file(ZeroOptions(), folder) : ZeroOptions();
    OffloadRun run(self, zero_by_name("fused AdamW"), options);
    run.train(0, 3);
    const auto kept = own_shard(*run.optimizer);
    OffloadRun other(self, zero_by_name("fused AdamW"), in_file(ZeroOptions(), folder));
    take_from_shard(*other.optimizer, kept);
    return int{all_equal(states_of(run), states_of(other))};
  });
  CHECK(taken == std::vector<int>{1, 1});
}

TEST_CASE(
    "a state that does not fit leaves the one in the file", "[zero][offload][errors][ranks]") {
  const TemporaryFolder folder;
  const auto same = run_ranks<int>(2, [&](const Rank& self) {
    OffloadRun run(self, zero_by_name("AdamW"), in_file(ZeroOptions(), folder));
    run.train(0, 2);
    const auto before = states_of(run);
    OffloadRun other(self, zero_by_name("AdamW"), ZeroOptions());
    other.train(0, 3);
    const auto whole = other.optimizer->consolidated();
    auto parameters = run.optimizer->unsharded();
    // The last tensor's state has another shape.
    for (size_t i = 0; i < run.net->parameters().size(); ++i) {
      const auto theirs = other.net->parameters()[i];
      auto state = whole->state().at(theirs.unsafeGetTensorImpl())->clone();
      if (i == 3) static_cast<torch::optim::AdamWParamState&>(*state).exp_avg(torch::ones({5}));
      parameters->state()[run.net->parameters()[i].unsafeGetTensorImpl()] = std::move(state);
    }
    const auto error = error_of<c10::ValueError>([&] { run.optimizer->load_whole(*parameters); });
    TORCH_CHECK(error.find("expected a state of the parameter's shape [3], got [5]") != error.npos);
    return int{all_equal(states_of(run), before)};
  });
  CHECK(same == std::vector<int>{1, 1});
}

TEST_CASE("a sharded optimizer with a file goes on in another group", "[zero][offload][ranks]") {
  const int stage = GENERATE(1, 2);
  const TemporaryFolder folder;
  const auto end_of = [&](const ZeroOptions& options) {
    return run_ranks<Tensors>(3, [&](const Rank& self) {
      OffloadRun run(self, zero_by_name("fused AdamW"), options);
      run.train(0, 2);
      const auto state = bytes_of_archive(*run.optimizer);
      if (self.rank == 2) return Tensors{};
      const auto pair = regroup(self, "pair", self.rank, 2);
      run.model->rebind(pair);
      run.optimizer->rebind(pair);
      auto archive = archive_of(state);
      run.optimizer->load(archive);
      run.train(2, 4);
      return copies_of(run.net->parameters());
    })[0];
  };
  const auto options = ZeroOptions().stage(stage);
  CHECK(all_equal(end_of(in_file(options, folder)), end_of(options)));
}

TEST_CASE("offload on CPUs is a warning, and changes nothing", "[zero][offload][ranks]") {
  const WarnAlways always;
  const auto values = run_ranks<std::vector<std::string>>(1, [&](const Rank& self) {
    Warnings warnings;
    OffloadRun offloaded(self, zero_by_name("AdamW"), ZeroOptions().offload(true));
    OffloadRun plain(self, zero_by_name("AdamW"), ZeroOptions());
    offloaded.train(0, 3);
    plain.train(0, 3);
    TORCH_CHECK(all_equal(offloaded.net->parameters(), plain.net->parameters()));
    return warnings.texts;
  });
  REQUIRE(values[0].size() == 1);
  CHECK_THAT(
      values[0][0], ContainsText("offload(true) changes nothing for parameters on CPUs") &&
                        ContainsText("offload_file(path)"));
}

TEST_CASE(
    "a file that cannot be made is an error on every rank", "[zero][offload][errors][ranks]") {
  const TemporaryFolder folder;
  const auto error_with = [&](const std::string& path, const std::string& others) {
    return errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
      const auto options = ZeroOptions().offload_file(self.rank == 1 ? path : others);
      OffloadRun run(self, zero_by_name("AdamW"), options);
      run.train(0, 1);
    });
  };
  const auto good = folder.file("state");
  CHECK_THAT(
      error_of_all(
          2,
          [&](const Rank& self) {
            OffloadRun run(self, zero_by_name("AdamW"), ZeroOptions().offload_file(""));
          }),
      ContainsText("expected offload_file() to name a file that can be made, got \"\""));
  for (const auto& error : error_with(folder.file("missing/state"), good)) {
    CHECK_THAT(
        error, ContainsText("rank 1 of 2") && ContainsText("missing/state\", got: No such file") &&
                   ContainsText("Give offload_file() a path in a folder of a local disk"));
  }
  for (const auto& error : error_with(folder.path(), good)) {
    CHECK_THAT(error, ContainsText("that is a folder, not the path of a file"));
  }
  const auto file = folder.write("file", "text");
  for (const auto& error : error_with(file + "/state", good)) {
    CHECK_THAT(error, ContainsText("Not a directory"));
  }
  CHECK(error_with(file, file)[0].empty());  // a file that is there stays as it is
  CHECK(read_bytes(file) == "text");
}

}  // namespace ddp
