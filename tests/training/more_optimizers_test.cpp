// The optimizers that LibTorch lacks: files, errors, ZeRO, and Muon over ranks.
// python_optimizers.py compares their steps with Python's.
#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp::more_optimizers_test {
namespace {

using namespace testing;

using Tensors = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Net = torch::nn::Sequential;
using Wrapped = DistributedDataParallel<Net>;

Net make_net() {
  using torch::nn::Linear;
  using torch::nn::LinearOptions;
  const auto without_bias = [](int64_t in, int64_t out) {
    return Linear(LinearOptions(in, out).bias(false));
  };
  Net net(
      without_bias(5, 11), torch::nn::Tanh(), without_bias(11, 7), torch::nn::Tanh(),
      without_bias(7, 3));
  set_waves(*net, {1, 1, 0});
  net->to(torch::kDouble);
  return net;
}

/// Makes an optimizer of parameters, and one that is sharded over the ranks of a model.
struct Maker {
  std::string name;
  std::function<OptimizerPtr(const Tensors&)> plain;
  std::function<OptimizerPtr(Wrapped&, const ZeroOptions&)> sharded;
};

template <typename Optimizer, typename Options>
Maker maker(const std::string& name, const Options& options) {
  return {
      name, [=](const Tensors& p) { return std::make_unique<Optimizer>(p, options); },
      [=](Wrapped& model, const ZeroOptions& zero) {
        return std::make_unique<ZeroRedundancyOptimizer<Optimizer>>(model, options, zero);
      }};
}

std::vector<Maker> makers() {
  return {
      maker<optim::NAdam>("NAdam", optim::NAdamOptions(0.02).weight_decay(0.1)),
      maker<optim::RAdam>("RAdam", optim::RAdamOptions(0.02).decoupled_weight_decay(true)),
      maker<optim::Adamax>("Adamax", optim::AdamaxOptions(0.02)),
      maker<optim::Adadelta>("Adadelta", optim::AdadeltaOptions(0.5)),
      maker<optim::Lion>("Lion", optim::LionOptions(0.01).weight_decay(0.1)),
      maker<optim::LAMB>("LAMB", optim::LAMBOptions(0.02)),
      maker<optim::Muon>("Muon", optim::MuonOptions(0.02).ns_dtype(at::kDouble)),
  };
}

at::Tensor input_of(int step) {
  return torch::cos(torch::arange(20.0, torch::kDouble).view({4, 5}) * (step + 1));
}

template <typename Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    zero_grad(optimizer);
    model->forward(input_of(step)).square().mean().backward();
    optimizer.step();
  }
}

constexpr int kSteps = 8;

Tensors trained_alone(const Maker& maker, int steps = kSteps) {
  auto net = make_net();
  const auto optimizer = maker.plain(net->parameters());
  train(net, *optimizer, 0, steps);
  return copies_of(net->parameters());
}

DistributedDataParallelOptions over(const Rank& self) {
  return DistributedDataParallelOptions().process_group(self.group).check_inputs(false);
}

}  // namespace

TEST_CASE("a run goes on from files of more optimizers", "[optim][pure]") {
  for (const auto& maker : makers()) {
    CAPTURE(maker.name);
    const TemporaryFolder folder;
    auto net = make_net();
    const auto optimizer = maker.plain(net->parameters());
    train(net, *optimizer, 0, 3);
    const auto values = copies_of(net->parameters());
    std::stringstream archive;
    torch::save(*optimizer, archive);
    save_state_dict(*optimizer, folder.path() + "/state.pt");
    train(net, *optimizer, 3, 6);
    for (const bool is_archive : {true, false}) {
      auto other = make_net();
      const auto resumed = maker.plain(other->parameters());
      resumed->param_groups()[0].options().set_lr(1);
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < values.size(); ++i) other->parameters()[i].copy_(values[i]);
      }
      if (is_archive) {
        archive.seekg(0);
        torch::load(*resumed, archive);
      } else {
        load_state_dict(*resumed, folder.path() + "/state.pt");
      }
      train(other, *resumed, 3, 6);
      CHECK(all_equal(other->parameters(), net->parameters()));
    }
  }
}

TEST_CASE("more optimizers name an option outside of its range", "[optim][pure][errors]") {
  const Tensors matrix{torch::ones({2, 2})};
  const auto error = [&](auto make) { return error_of([&] { make(); }); };
  CHECK_THAT(
      error([&] { optim::NAdam(matrix, optim::NAdamOptions(-1)); }),
      ContainsText("ddp::optim::NAdam: expected lr >= 0, got -1"));
  CHECK_THAT(
      error([&] {
        optim::Adamax(matrix, optim::AdamaxOptions().betas({0.5, 1}));
      }),
      ContainsText("expected betas in [0, 1), got 1"));
  CHECK_THAT(
      error([&] { optim::Adadelta(matrix, optim::AdadeltaOptions().rho(1.5)); }),
      ContainsText("expected rho in [0, 1], got 1.5"));
  CHECK_THAT(
      error([&] { optim::Muon(matrix, optim::MuonOptions().adjust_lr_fn("other")); }),
      ContainsText("\"match_rms_adamw\", got \"other\""));
  CHECK_THAT(
      error([&] { optim::Muon(matrix, optim::MuonOptions().ns_steps(100)); }),
      ContainsText("expected ns_steps in [0, 100), got 100"));
  CHECK_THAT(
      error([&] { optim::Muon(matrix, optim::MuonOptions().ns_dtype(at::kHalf)); }),
      ContainsText("expected ns_dtype at::kBFloat16, kFloat or kDouble"));
  CHECK_THAT(
      error([&] { optim::Muon(Tensors{torch::ones({3})}); }),
      ContainsText("expected parameters of two dimensions, got one of [3]"));
  matrix[0].mutable_grad() = torch::ones({2, 2}).to_sparse();
  for (const auto& maker : makers()) {
    const auto optimizer = maker.plain(matrix);
    CHECK_THAT(error_of([&] { optimizer->step(); }), ContainsText("expected dense gradients"));
  }
}

TEST_CASE("sharded steps of more optimizers equal those without sharding", "[optim][ranks]") {
  const int world = GENERATE(1, 2, 3);
  for (const auto& maker : makers()) {
    const auto alone = trained_alone(maker);
    const bool is_whole = maker.name == "LAMB" || maker.name == "Muon";
    for (const bool overlap : {false, true}) {
      for (const int stage : {1, 2}) {
        if (is_whole && stage == 2) continue;
        CAPTURE(maker.name, world, overlap, stage);
        const auto ends = run_ranks<Tensors>(world, [&](const Rank& self) {
          const auto net = make_net();
          Wrapped model(net, over(self));
          const auto optimizer = maker.sharded(model, ZeroOptions().stage(stage).overlap(overlap));
          train(model, *optimizer, 0, kSteps);
          return copies_of(net->parameters());
        });
        for (const auto& end : ends) CHECK(largest_difference(end, alone) < 1e-10);
      }
    }
  }
}

TEST_CASE("a sharded state of more optimizers is the whole one's", "[optim][ranks]") {
  for (const auto& maker : makers()) {
    CAPTURE(maker.name);
    const auto alone = trained_alone(maker);
    const auto ends = run_ranks<Tensors>(2, [&](const Rank& self) {
      const auto net = make_net();
      Wrapped model(net, over(self));
      const auto first = maker.sharded(model, {});
      train(model, *first, 0, 3);
      std::stringstream archive;
      torch::save(*first, archive);
      // On with a file of a state that is divided otherwise.
      const auto offloaded = maker.sharded(model, ZeroOptions().offload_file("/tmp/state"));
      torch::load(*offloaded, archive);
      train(model, *offloaded, 3, 5);
      std::stringstream again;
      torch::save(*offloaded, again);
      const auto plain = maker.plain(net->parameters());
      torch::load(*plain, again);
      train(model, *plain, 5, kSteps);
      return copies_of(net->parameters());
    });
    for (const auto& end : ends) CHECK(largest_difference(end, alone) < 1e-10);
  }
}

TEST_CASE("a sharded optimizer says how even whole parameters are", "[optim][ranks][errors]") {
  const auto balances = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    Net net(
        torch::nn::Linear(torch::nn::LinearOptions(10, 30).bias(false)),
        torch::nn::Linear(torch::nn::LinearOptions(30, 2).bias(false)));
    Wrapped model(net, over(self));
    ZeroRedundancyOptimizer<optim::LAMB> whole(model, optim::LAMBOptions());
    ZeroRedundancyOptimizer<optim::NAdam> divided(model, optim::NAdamOptions());
    return std::vector<double>{whole.balance(), divided.balance()};
  });
  for (const auto& balance : balances) {
    CHECK(balance[0] == 360.0 / (2 * 300));
    CHECK(balance[1] == 1);
  }
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Wrapped model(make_net(), over(self));
    ZeroRedundancyOptimizer<optim::Muon> muon(model, optim::MuonOptions(), ZeroOptions().stage(2));
  });
  for (const auto& error : errors) {
    CHECK_THAT(error, ContainsText("expected stage 1 of an"));
    CHECK_THAT(error, ContainsText("Set stage(1), or take a fully sharded model"));
  }
}

TEST_CASE("Muon's ranks divide the work, and step as one", "[optim][ranks]") {
  const int world = GENERATE(1, 2, 3);
  const bool in_backward = GENERATE(false, true);
  const auto dtype = GENERATE(at::kBFloat16, at::kDouble);
  CAPTURE(world, in_backward, dtype);
  const auto options = optim::MuonOptions(0.02).ns_dtype(dtype);
  const auto alone = trained_alone(maker<optim::Muon>("Muon", options));
  const auto ends = run_ranks<Tensors>(world, [&](const Rank& self) {
    const auto net = make_net();
    Wrapped model(net, over(self).bucket_cap_mb(0.0002));
    const auto muon = std::make_shared<optim::Muon>(*model, options);
    if (in_backward) model->step_in_backward(muon);
    for (int step = 0; step < kSteps; ++step) {
      muon->zero_grad();
      model->forward(input_of(step)).square().mean().backward();
      if (!in_backward) muon->step();
    }
    return copies_of(net->parameters());
  });
  for (const auto& end : ends) {
    CHECK(largest_difference(end, alone) < 1e-10);
    CHECK(all_equal(end, ends[0]));
  }
}

TEST_CASE("Muon takes a model's matrices, and leaves the rest", "[optim][pure]") {
  Net net(torch::nn::Linear(3, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  net->parameters()[2].requires_grad_(false);
  const auto split = optim::split_for_muon(*net);
  REQUIRE(split.matrices.size() == 1);
  CHECK(split.matrices[0].is_same(net->parameters()[0]));
  CHECK(split.others.size() == 2);
  const optim::Muon muon(*net);
  CHECK(muon.param_groups()[0].params().size() == 1);
}

TEST_CASE("Muon's ranks throw alike for matrices that differ", "[optim][ranks][errors]") {
  const auto of_order = errors_of_ranks(2, [](const Rank& self) {
    const auto net = make_net();
    Wrapped model(net, over(self));
    auto matrices = net->parameters();
    if (self.rank == 1) std::swap(matrices[0], matrices[1]);
    const optim::Muon muon(*model, {matrices});
  });
  for (const auto& error : of_order) {
    CHECK_THAT(
        error, ContainsText("got 0.weight of 11 x 5 on rank 0 and 2.weight of 7 x 11 on rank 1"));
  }
  const auto of_gradients = errors_of_ranks(2, [](const Rank& self) {
    const auto net = make_net();
    Wrapped model(net, over(self));
    optim::Muon muon(*model);
    model->forward(input_of(0)).square().mean().backward();
    if (self.rank == 1) net->parameters()[1].mutable_grad().reset();
    muon.step();
  });
  for (const auto& error : of_gradients) {
    CHECK_THAT(error, ContainsText("\"2.weight\" or none, got one on rank 0 and none on rank 1"));
  }
  const auto of_others = errors_of_ranks(2, [](const Rank& self) {
    Wrapped model(make_net(), over(self));
    const optim::Muon muon(*model, {Tensors{torch::ones({2, 2})}});
  });
  for (const auto& error : of_others) {
    CHECK_THAT(error, ContainsText("expected parameters of the model, got another one, of [2, 2]"));
  }
}

TEST_CASE("Muon steps shards as whole matrices", "[optim][ranks]") {
  const int world = GENERATE(1, 2, 3, 5);
  const bool has_units = GENERATE(false, true);
  CAPTURE(world, has_units);
  const auto options = optim::MuonOptions(0.02).ns_dtype(at::kDouble);
  const auto alone = trained_alone(maker<optim::Muon>("Muon", options));
  const auto ends = run_ranks<Tensors>(world, [&](const Rank& self) {
    auto net = make_net();
    const auto sharded = FullyShardedOptions().process_group(self.group);
    if (has_units) fully_shard_children(net, sharded);
    FullyShardedDataParallel<Net> model(net, sharded);
    optim::Muon muon(*model, options);
    train(model, muon, 0, kSteps);
    const SummonFullParams whole(*model);
    return copies_of(model->parameters());
  });
  for (const auto& end : ends) CHECK(largest_difference(end, alone) < 1e-10);
}

namespace {

at::Tensor wave(double phase) {
  return torch::sin(torch::arange(48.0, torch::kDouble) * 0.7 + phase).view({8, 6});
}

/// This rank's elements of a tensor of the parameter's whole shape.
at::Tensor part_of(const at::Tensor& whole, const ParameterLayout& layout) {
  const auto& box = layout.boxes.front();
  return whole.narrow(0, box.offset[0], box.size[0]).narrow(1, box.offset[1], box.size[1]);
}

/// The largest difference between a cut layer's weight and the whole one after some steps.
double difference_of_steps(torch::nn::Module& layer) {
  const auto options = optim::MuonOptions(0.02).ns_dtype(at::kDouble);
  const auto whole = wave(0);
  optim::Muon alone(Tensors{whole}, options), together(layer, options);
  double most = 0;
  for (int step = 0; step < 4; ++step) {
    whole.mutable_grad() = wave(step + 1);
    alone.step();
    for (const auto& layout : layouts_of(layer)) {
      if (layout.sizes.size() != 2) continue;
      layout.local.mutable_grad() = part_of(wave(step + 1), layout).clone();
    }
    together.step();
    for (const auto& layout : layouts_of(layer)) {
      if (layout.sizes.size() != 2) continue;
      most = std::max(most, difference(layout.local, part_of(whole, layout)));
    }
  }
  return most;
}

}  // namespace

TEST_CASE("Muon steps layers that are cut over ranks as whole matrices", "[optim][ranks]") {
  const auto differences = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    const auto bias = torch::zeros({8}, torch::kDouble);
    ColumnParallelLinear rows(
        ColumnParallelLinearOptions(6, 8).process_group(self.group), wave(0), bias);
    RowParallelLinear columns(
        RowParallelLinearOptions(6, 8).process_group(self.group), wave(0), bias);
    return std::vector<double>{difference_of_steps(*rows), difference_of_steps(*columns)};
  });
  for (const auto& of_rank : differences) {
    CHECK(of_rank[0] < 1e-12);
    CHECK(of_rank[1] < 1e-12);
  }
}

TEST_CASE("LAMB and a Muon without a model refuse shards", "[optim][ranks][errors]") {
  const auto errors_with = [](const auto& make) {
    return errors_of_ranks(2, [&](const Rank& self) {
      FullyShardedDataParallel<Net> model(
          make_net(), FullyShardedOptions().process_group(self.group));
      const OptimizerPtr optimizer = make(model->parameters());
      train(model, *optimizer, 0, 1);
    });
  };
  for (const auto& error : errors_with(makers()[5].plain)) {
    CHECK_THAT(error, ContainsText("ddp::optim::LAMB: expected whole parameters, got this rank's"));
  }
  for (const auto& error : errors_with(makers()[6].plain)) {
    CHECK_THAT(error, ContainsText("Make it from the model: ddp::optim::Muon(*model, options)"));
  }
}

TEST_CASE("ZeRO refuses parts of layers where whole ones are needed", "[optim][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto alone = split_group(self.rank, 0, self.group);
    DistributedDataParallel model(
        ColumnParallelLinear(
            ColumnParallelLinearOptions(6, 8).bias(false).process_group(self.group),
            at::ones({8, 6}, at::kDouble), at::Tensor()),
        DistributedDataParallelOptions().process_group(alone));
    const ZeroRedundancyOptimizer<optim::Muon> optimizer(model, optim::MuonOptions(0.02));
  });
  for (const auto& error : errors) {
    CHECK_THAT(error, ContainsText("expected whole parameters for an optimizer that needs them"));
  }
}

TEST_CASE("Muon's state over shards is saved whole", "[optim][ranks]") {
  const TemporaryFolder folder;
  const auto options = optim::MuonOptions(0.02).ns_dtype(at::kDouble);
  const auto alone = trained_alone(maker<optim::Muon>("Muon", options));
  Tensors end;
  for (const int world : {2, 3}) {
    const auto ends = run_ranks<Tensors>(world, [&](const Rank& self) {
      auto net = make_net();
      FullyShardedDataParallel<Net> model(net, FullyShardedOptions().process_group(self.group));
      optim::Muon muon(*model, options);
      Checkpointer checkpointer(folder.path(), CheckpointerOptions().process_group(self.group));
      checkpointer.add("model", *model).add("optimizer", muon);
      if (world == 2) {
        train(model, muon, 0, 4);
        checkpointer.save(4);
        checkpointer.wait();
      } else {
        checkpointer.load_latest();
        train(model, muon, 4, kSteps);
      }
      const SummonFullParams whole(*model);
      return copies_of(model->parameters());
    });
    end = ends[0];
  }
  CHECK(largest_difference(end, alone) < 1e-10);
}

}  // namespace ddp::more_optimizers_test
