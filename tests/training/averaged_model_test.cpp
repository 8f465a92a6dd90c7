// Averages of weights on ranks, and the guard that gives a model its averages; averaged_models.py
// compares their numbers and files with Python's.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/averaged_model.h>
#include <ddp/checkpointer.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/full_state_dict.h>
#include <ddp/fully_sharded.h>
#include <ddp/state_dict.h>
#include <ddp/sync_batch_norm.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNormOptions;
using torch::nn::Linear;
using Sequential = torch::nn::Sequential;

using Copies = std::vector<at::Tensor>;

Copies copies_of(const torch::nn::Module& module) {
  Copies copies;
  for (const auto& tensor : module.parameters()) copies.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) copies.push_back(tensor.detach().clone());
  return copies;
}

bool are_equal(const Copies& a, const Copies& b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = torch::equal(a[i], b[i]);
  return equal;
}

Sequential normed_net() {
  return Sequential(Linear(3, 4), BatchNorm1d(BatchNormOptions(4).momentum(0.3)), Linear(4, 2));
}

void shift(torch::nn::Module& module, double by) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.add_(by);
}

at::Tensor batch_of(int64_t number) {
  return draw_values({5, 3}, 40 + static_cast<uint64_t>(number), at::kFloat);
}

}  // namespace

TEST_CASE("the guard of apply() gives a model the averages, and what it had", "[pure]") {
  auto net = normed_net();
  AveragedModel average(*net, AveragedModelOptions().ema(0.5));
  average.update();
  const auto before = copies_of(*net);
  shift(*net, 2);
  net->buffers()[0].add_(7);
  average.update();
  const auto trained = copies_of(*net);
  const auto averages = copies_of(average);  // with the count
  {
    const auto guard = average.apply();
    const auto applied = copies_of(*net);
    CHECK(torch::allclose(applied[0], before[0] + 1));
    CHECK(are_equal(
        {applied.begin(), applied.begin() + 6}, {averages.begin(), averages.begin() + 6}));
    CHECK(torch::equal(net->buffers()[0], trained[6]));
    shift(*net, 1);  // lost
  }
  CHECK(are_equal(copies_of(*net), trained));
  CHECK(are_equal(copies_of(average), averages));
  try {
    const auto guard = average.apply();
    throw std::runtime_error("in evaluation");
  } catch (const std::runtime_error&) {
  }
  CHECK(are_equal(copies_of(*net), trained));
  auto guard = average.apply();
  guard.restore();
  guard.restore();
  CHECK(are_equal(copies_of(*net), trained));
  average.update();  // is allowed again
}

TEST_CASE("averages refuse what would mix them with the model", "[pure][errors]") {
  auto net = normed_net();
  AveragedModel average(*net);
  {
    const auto guard = average.apply();
    CHECK(error_of([&] {
            average.update();
          }).find("no guard of apply() during update()") != std::string::npos);
    CHECK(error_of([&] {
            const auto nested = average.apply();
          }).find("during apply()") != std::string::npos);
    CHECK(error_of([&] {
            average.update_bn(Copies{}, [](auto&) {});
          }).find("during update_bn()") != std::string::npos);
  }
  const auto refuses = [&](const AveragedModelOptions& options, const std::string& text) {
    return error_of([&] { AveragedModel(*net, options); }).find(text) != std::string::npos;
  };
  CHECK(refuses(AveragedModelOptions().ema(1.5), "0 <= decay <= 1 in ema, got 1.5"));
  CHECK(refuses(AveragedModelOptions().warmup(true), "expected ema for warmup"));
  net->parameters()[0].set_data(torch::zeros({9, 9}));
  CHECK(error_of([&] {
          average.update();
        }).find("expected 0.weight in update() as it was") != std::string::npos);
  CHECK(average.n_averaged() == 0);
  Linear plain(2, 2);
  AveragedModel without(*plain);
  CHECK(error_of([&] {
          without.update_bn(Copies{}, [](auto&) {});
        }).find("SyncBatchNorm, got none") != std::string::npos);
  without.update();  // the guard ended
}

TEST_CASE("bool buffers are copied, integers cut off, shared tensors averaged once", "[pure]") {
  torch::nn::Module net;
  const auto shared = net.register_parameter("first", torch::zeros({2}), false);
  net.register_parameter("second", shared, false);
  const auto flags = net.register_buffer("flags", torch::tensor({true, false}));
  const auto count = net.register_buffer("count", torch::tensor({3, 3}));
  AveragedModel average(net, AveragedModelOptions().ema(0.5).use_buffers(true));
  average.update();
  shared.fill_(1);
  flags.logical_not_();
  count.fill_(6);
  average.update();
  const auto dict = average.state_dict();
  CHECK(
      dict.keys() ==
      std::vector<std::string>{
          "n_averaged", "module.first", "module.second", "module.flags", "module.count"});
  CHECK(torch::equal(dict["module.first"], torch::full({2}, 0.5)));
  CHECK(dict["module.first"].data_ptr() == dict["module.second"].data_ptr());
  CHECK(torch::equal(dict["module.flags"], flags));
  CHECK(torch::equal(dict["module.count"], torch::tensor({4, 4})));
}

TEST_CASE("update_bn restores momenta, modes and the model, also after an exception", "[pure]") {
  auto net = normed_net();
  auto& norm = *net[1]->as<torch::nn::BatchNorm1d>();
  AveragedModel average(*net);
  average.update();
  shift(*net, 3);
  net->train();
  norm.eval();  // frozen
  const auto trained = copies_of(*net);
  const auto averages = copies_of(average);
  const auto is_restored = [&] {
    return are_equal(copies_of(*net), trained) && norm.options.momentum() == 0.3 &&
           !norm.is_training() && net->is_training();
  };
  int batches = 0;
  const Copies loader{batch_of(0), batch_of(1), batch_of(2)};
  CHECK_THROWS_AS(
      average.update_bn(
          loader,
          [&](auto& batch) {
            if (++batches == 2) throw std::runtime_error("no more");
            net->forward(batch);
          }),
      std::runtime_error);
  CHECK(is_restored());
  CHECK(are_equal(copies_of(average), averages));
  average.update_bn(std::make_unique<Copies>(loader), [&](auto& batch) { net->forward(batch); });
  CHECK(is_restored());
  CHECK(average.state_dict()["module.1.num_batches_tracked"].item<int64_t>() == 3);
}

TEST_CASE("update_bn of a group has the statistics of all ranks' batches", "[ranks]") {
  const int size = GENERATE(1, 3);
  CAPTURE(size);
  const auto statistics = [](Sequential& net, const Copies& batches,
                             const std::optional<ProcessGroup>& group) {
    set_waves(*net);
    AveragedModel average(*net);
    average.update();
    average.update_bn(
        batches, [&](auto& batch) { net->forward(batch); }, group);
    const auto dict = average.state_dict();
    return Copies{
        dict["module.1.running_mean"], dict["module.1.running_var"],
        dict["module.1.num_batches_tracked"]};
  };
  // Rank r has r + 1 batches.
  Copies all;
  for (int64_t i = 0; i < size * (size + 1) / 2; ++i) all.push_back(batch_of(i));
  auto alone = normed_net();
  const auto expected = statistics(alone, all, std::nullopt);
  const auto of_ranks = run_ranks<Copies>(size, [&](const Rank& self) {
    auto net = normed_net();
    const auto begin = all.begin() + self.rank * (self.rank + 1) / 2;
    return statistics(net, Copies(begin, begin + self.rank + 1), self.group);
  });
  for (const auto& got : of_ranks) {
    for (size_t i = 0; i < 3; ++i)
      CHECK(torch::allclose(got[i].to(at::kDouble), expected[i].to(at::kDouble), 1e-5, 1e-6));
  }
}

TEST_CASE("update_bn without batches is an error, and changes nothing", "[ranks][errors]") {
  const int size = GENERATE(1, 2);
  const bool has_group = GENERATE(false, true);
  CAPTURE(size, has_group);
  const auto errors = run_ranks<std::string>(size, [&](const Rank& self) {
    auto net = normed_net();
    set_waves(*net);
    AveragedModel average(*net);
    average.update();
    const auto group = has_group ? std::optional<ProcessGroup>(self.group) : std::nullopt;
    const auto forward = [&](auto& batch) { net->forward(batch); };
    average.update_bn(Copies{batch_of(1)}, forward, group);
    const auto averages = copies_of(average), trained = copies_of(*net);
    auto error = error_of([&] { average.update_bn(Copies{}, forward, group); });
    if (!are_equal(copies_of(average), averages) || !are_equal(copies_of(*net), trained)) {
      error = "changed: " + error;
    }
    if (!has_group || size == 1) return error;
    // Enough where one rank has a batch.
    average.update_bn(Copies(static_cast<size_t>(self.rank), batch_of(1)), forward, group);
    return error;
  });
  for (const auto& error : errors) {
    CHECK(error.find("AveragedModel::update_bn: expected a loader with batches") == 0);
  }
}

namespace {

Sequential sharded_net() {
  Sequential net(Linear(3, 7), torch::nn::Tanh(), Linear(7, 5), BatchNorm1d(5));
  set_waves(*net);
  return net;
}

/// Trains a sharded model and its average for three steps, and returns the whole of the average.
struct ShardedAverage {
  explicit ShardedAverage(const ProcessGroup& group)
      : net(sharded_net()),
        model(make(net, group)),
        optimizer(model->parameters(), 0.1),
        average(*model, AveragedModelOptions().ema(0.75)) {}

  static FullyShardedDataParallel<Sequential> make(Sequential& net, const ProcessGroup& group) {
    const auto options = FullyShardedOptions().process_group(group);
    fully_shard_children(net, options);
    return FullyShardedDataParallel<Sequential>(net, options);
  }

  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      model->forward(batch_of(i)).square().sum().backward();
      optimizer.step();
      average.update();
    }
  }

  at::Tensor evaluate() {
    const at::NoGradGuard no_grad;
    model->eval();
    auto output = model->forward(batch_of(9));
    model->train();
    return output;
  }

  Sequential net;
  FullyShardedDataParallel<Sequential> model;
  torch::optim::SGD optimizer;
  AveragedModel average;
};

}  // namespace

TEST_CASE("the averages of shards are those of the whole", "[ranks]") {
  const int size = GENERATE(1, 2, 3);
  CAPTURE(size);
  const TemporaryFolder folder;
  auto alone = sharded_net();
  torch::optim::SGD optimizer(alone->parameters(), 0.1);
  AveragedModel average(*alone, AveragedModelOptions().ema(0.75));
  for (int i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    alone->forward(batch_of(i % 3)).square().sum().backward();
    optimizer.step();
    average.update();
  }
  const auto expected = average.state_dict();
  at::Tensor applied;
  {
    const auto guard = average.apply();
    const at::NoGradGuard no_grad;
    alone->eval();
    applied = alone->forward(batch_of(9));
  }
  const auto save = [&](ShardedAverage& run, const ProcessGroup& group) {
    Checkpointer checkpointer(folder.path(), CheckpointerOptions().process_group(group));
    checkpointer.add("model", run.model).add("ema", run.average);
    if (const auto step = checkpointer.load_latest()) return run.train(2);
    run.train(3);
    checkpointer.save(3);
    checkpointer.wait();
  };
  run_ranks<int>(size == 1 ? 2 : 1, [&](const Rank& self) {
    ShardedAverage run(self.group);
    save(run, self.group);
    return 0;
  });
  const auto problems = run_ranks<std::string>(size, [&](const Rank& self) -> std::string {
    ShardedAverage run(self.group);
    save(run, self.group);
    const auto whole = full_state_dict(run.average, 0, self.group);
    if (self.rank == 0 && whole.keys() != expected.keys()) return "other names";
    for (const auto& item : whole) {
      if (!torch::allclose(
              expected[item.key()].to(at::kDouble), item.value().to(at::kDouble), 1e-5, 1e-6))
        return item.key();
    }
    const auto plain = run.evaluate();
    {
      const auto guard = run.average.apply();
      if (!torch::allclose(run.evaluate(), applied, 1e-4, 1e-5)) return "evaluation";
    }
    return torch::equal(run.evaluate(), plain) ? "" : "not restored";
  });
  CHECK(problems == std::vector<std::string>(static_cast<size_t>(size)));
}

TEST_CASE("averages of a gathered unit are refused", "[ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ShardedAverage run(self.group);
    const SummonFullParams whole(*run.model);
    run.average.update();
  });
  CHECK_THAT(errors, Each(ContainsText("outside of forward, unshard() and SummonFullParams")));
}
