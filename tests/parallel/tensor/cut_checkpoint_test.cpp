// A Checkpointer saves a model that is cut whole, with its optimizer, and loads it on other cuts.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/tensor/cut_model.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;

namespace {

using Values = std::map<std::string, torch::Tensor>;

enum class Kind { Sgd, AdamW, Zero };

/// One rank of a run that is saved.
struct SavedRun {
  SavedRun(const Rank& self, Kind kind, int tp_size, uint64_t seed = 1)
      : mesh(ddp::init_device_mesh({self.size / tp_size, tp_size}, {"dp", "tp"}, self.group)),
        model(
            CutModel(WholeModel(seed), mesh.group("tp"), Cut{tp_size > 1}),
            ddp::DistributedDataParallelOptions().process_group(mesh.group("dp"))) {
    if (kind == Kind::Sgd) {
      optimizer = std::make_unique<torch::optim::SGD>(
          model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    } else if (kind == Kind::AdamW) {
      optimizer = std::make_unique<torch::optim::AdamW>(
          model->parameters(), torch::optim::AdamWOptions(1e-2).amsgrad(true));
    } else {
      optimizer = std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::AdamW>>(
          model, torch::optim::AdamWOptions(1e-2));
    }
  }

  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      optimizer->zero_grad();
      const auto tokens = tokens_of(step, 4);
      model->forward(tokens.chunk(mesh.size("dp"), 1)[static_cast<size_t>(mesh.rank("dp"))])
          .backward();
      optimizer->step();
    }
  }

  void add_to(ddp::Checkpointer& checkpointer) {
    checkpointer.add("optimizer", *optimizer).add("model", model);
  }

  /// Copies of this rank's elements of all parameters, by name and box.
  Values own_values() const {
    Values values;
    for (const auto& layout : ddp::layouts_of(*model)) {
      const auto views = ddp::views_of_boxes(layout, layout.local.detach());
      for (size_t i = 0; i < views.size(); ++i) {
        const c10::IntArrayRef offset(layout.boxes[i].offset);
        values[c10::str(layout.name, offset)] = views[i].clone();
      }
    }
    return values;
  }

  ddp::DeviceMesh mesh;
  ddp::DistributedDataParallel<CutModel> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

ddp::CheckpointerOptions options_of(const Rank& self) {
  return ddp::CheckpointerOptions().process_group(self.group);
}

bool are_equal(const Values& a, const Values& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.first == y.first && torch::equal(x.second, y.second);
         });
}

// Trains 3 steps, saves, and trains on to step 5.
std::vector<Values> save_and_go_on(const std::string& folder, Kind kind) {
  return run_ranks<Values>(4, [&](const Rank& self) {
    SavedRun run(self, kind, 2);
    ddp::Checkpointer checkpointer(folder, options_of(self));
    run.add_to(checkpointer);
    run.train(0, 3);
    checkpointer.save(3);
    run.train(3, 5);
    checkpointer.wait();
    return run.own_values();
  });
}

template <typename Layer>
std::unique_ptr<torch::optim::SGD> step_of_ones(const Layer& layer) {
  auto optimizer = std::make_unique<torch::optim::SGD>(
      layer->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (auto& p : layer->parameters()) p.mutable_grad() = torch::ones_like(p);
  optimizer->step();
  return optimizer;
}

// A layer and its optimizer, saved by a run that cut nothing.
torch::nn::Linear save_whole_layer(const std::string& folder) {
  torch::nn::Linear layer(4, 4);
  const auto optimizer = step_of_ones(layer);
  run_ranks<int>(1, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder, options_of(self).background(false));
    checkpointer.add("model", layer).add("optimizer", *optimizer);
    checkpointer.save(1);
    return 0;
  });
  return layer;
}

ddp::ColumnParallelLinear cut_layer(const ddp::ProcessGroup& group) {
  return ddp::ColumnParallelLinear(
      ddp::ColumnParallelLinearOptions(4, 4).process_group(group), torch::ones({4, 4}),
      torch::ones({4}));
}

// Its layout is wrong on rank 1.
struct WrongModule : torch::nn::Module, ddp::ShardedModule {
  explicit WrongModule(ddp::ProcessGroup ranks)
      : group(std::move(ranks)), weight(register_parameter("weight", torch::ones({2}))) {}

  std::vector<ddp::ParameterLayout> layouts() override {
    ddp::ParameterLayout layout{"weight", {5}, torch::kFloat, weight, {}, {group}, {}};
    const int64_t rank = group->getRank();
    layout.boxes = {{{2 * rank}, {2 + rank}}};
    return {layout};
  }

  ddp::ProcessGroup group;
  torch::Tensor weight;
};

// The whole values, from the ranks' parts.
Values whole_values(const std::vector<CutModel>& models) {
  Values whole;
  for (const auto& model : models) {
    for (const auto& layout : ddp::layouts_of(*model)) {
      auto& all = whole[layout.name];
      if (!all.defined()) all = torch::full(layout.sizes, -1e9, torch::kDouble);
      const auto views = ddp::views_of_boxes(layout, layout.local.detach());
      for (size_t i = 0; i < views.size(); ++i) {
        auto box = all;
        for (int64_t d = 0; d < all.dim(); ++d) {
          const auto at = static_cast<size_t>(d);
          box = box.narrow(d, layout.boxes[i].offset[at], layout.boxes[i].size[at]);
        }
        box.copy_(views[i]);
      }
    }
  }
  return whole;
}

}  // namespace

TEST_CASE("a cut model resumes to the bit", "[parallel][cut_checkpoint][ranks]") {
  const auto kind = GENERATE(Kind::Sgd, Kind::AdamW, Kind::Zero);
  const TemporaryFolder folder;
  const auto expected = save_and_go_on(folder.path(), kind);
  const auto resumed = run_ranks<Values>(4, [&](const Rank& self) {
    SavedRun run(self, kind, 2, /*seed=*/100);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    run.add_to(checkpointer);
    run.train(7, 8);  // a state to be replaced
    TORCH_CHECK(checkpointer.load_latest() == 3);
    run.train(3, 5);
    run.model->check_replicas();
    return run.own_values();
  });
  for (size_t rank = 0; rank < 4; ++rank) CHECK(are_equal(resumed[rank], expected[rank]));
  CHECK_FALSE(are_equal(resumed[0], resumed[1]));
}

TEST_CASE("a cut model is saved once, by all ranks", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  save_and_go_on(folder.path(), Kind::Sgd);
  auto names = names_in(folder.file("step-00000003"));
  std::sort(names.begin(), names.end());
  CHECK(
      names == std::vector<std::string>{
                   "manifest.json", "model.shard-00000.pt", "model.shard-00001.pt", "optimizer.pt",
                   "optimizer.shard-00000.pt", "optimizer.shard-00001.pt", "rank-0.pt", "rank-1.pt",
                   "rank-2.pt", "rank-3.pt"});
}

TEST_CASE("a cut model loads on other cuts", "[parallel][cut_checkpoint][ranks][many]") {
  const auto kind = GENERATE(Kind::Sgd, Kind::AdamW, Kind::Zero);
  const TemporaryFolder folder;
  // One rank at a time goes on from the step that the one before saved, with the model cut so.
  const std::vector<int> cuts{2, 1, 4, 2};
  std::vector<Values> saved, loaded;
  for (size_t i = 0; i < cuts.size(); ++i) {
    const auto first = static_cast<int64_t>(i);
    std::vector<CutModel> models_before(4, nullptr), models_after(4, nullptr);
    std::vector<Values> before(4), after(4);
    run_ranks<int>(4, [&](const Rank& self) {
      SavedRun run(self, kind, cuts[i], /*seed=*/1 + 100 * i);
      ddp::Checkpointer checkpointer(folder.path(), options_of(self));
      run.add_to(checkpointer);
      if (i > 0) TORCH_CHECK(checkpointer.load_latest() == first);
      const auto rank = static_cast<size_t>(self.rank);
      before[rank] = whole_values({run.model->module()});
      run.train(first, first + 1);
      checkpointer.save(first + 1);
      checkpointer.wait();
      after[rank] = whole_values({run.model->module()});
      return 0;
    });
    const auto joined = [](const std::vector<Values>& parts) {
      Values all = parts[0];
      for (const auto& part : parts) {
        for (auto& [name, value] : all) value = torch::maximum(value, part.at(name));
      }
      return all;
    };
    loaded.push_back(joined(before));
    saved.push_back(joined(after));
  }
  for (size_t i = 1; i < cuts.size(); ++i) {
    CAPTURE(i);
    CHECK(are_equal(loaded[i], saved[i - 1]));
  }
  // The optimizer's state came along: the values are those of a run that never stopped.
  const auto all_at_once = run_ranks<Values>(1, [&](const Rank& self) {
    SavedRun run(self, kind, 1);
    run.train(0, static_cast<int64_t>(cuts.size()));
    return whole_values({run.model->module()});
  });
  for (const auto& [name, value] : all_at_once[0]) {
    CAPTURE(name);
    // The keys' bias has no gradient but rounding errors, which AdamW makes steps of.
    if (name == "attention.in_proj.bias") continue;
    CHECK((value - saved.back().at(name)).abs().max().item<double>() < 1e-9);
  }
}

TEST_CASE("replicas of one part save it as it is", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto faults = run_ranks<std::string>(4, [&](const Rank& self) -> std::string {
    SavedRun run(self, Kind::AdamW, 2);
    const auto own = folder.file("part-" + std::to_string(run.mesh.rank("tp")));
    ddp::Checkpointer checkpointer(
        own, ddp::CheckpointerOptions().process_group(run.mesh.group("dp")));
    run.add_to(checkpointer);
    run.train(0, 2);
    const auto before = run.own_values();
    checkpointer.save(2);
    run.train(2, 3);
    checkpointer.load(2);
    const auto names = names_in(own + "/step-00000002");
    const bool is_whole = std::find(names.begin(), names.end(), "model.pt") != names.end();
    return is_whole && are_equal(run.own_values(), before) ? "" : "not as it was";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE("the group of a sharded optimizer saves its state", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto faults = run_ranks<std::string>(4, [&](const Rank& self) -> std::string {
    SavedRun run(self, Kind::Zero, 1);
    ddp::Checkpointer checkpointer(
        folder.path(), ddp::CheckpointerOptions().process_group(run.mesh.group("dp")));
    run.add_to(checkpointer);
    run.train(0, 2);
    checkpointer.save(2);
    run.train(2, 3);
    const auto next = run.own_values();
    checkpointer.load(2);
    run.train(2, 3);
    return are_equal(run.own_values(), next) ? "" : "not as it was";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE(
    "an optimizer without names for its state is refused for a cut model",
    "[parallel][cut_checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    const CutModel model(WholeModel(), self.group);
    torch::optim::LBFGS optimizer(model->parameters());
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("model", model).add("optimizer", optimizer);
    checkpointer.save(1);
  });
  CHECK_THAT(
      errors, Each(Contains("expected one of LibTorch's Adam, AdamW, SGD, RMSprop and Adagrad for "
                            "parameters that are cut over the ranks")));
}

TEST_CASE("a group's own random numbers go on after a load", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto draw = [](const Rank& self) {
    const ddp::TensorParallelRng own(self.group);
    return torch::rand({4});
  };
  const auto expected = run_ranks<torch::Tensor>(1, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).background(false));
    draw(self);
    checkpointer.save(1);
    const auto next = draw(self);
    draw(self);
    checkpointer.load(1);
    TORCH_CHECK(draw(self).equal(next), "a group that has drawn");
    return next;
  });
  const auto resumed = run_ranks<torch::Tensor>(1, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.load(1);
    return draw(self);
  });
  CHECK(resumed[0].equal(expected[0]));
}

TEST_CASE("layers on one rank load a file of whole ones", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto saved = save_whole_layer(folder.path());
  const auto faults = run_ranks<std::string>(1, [&](const Rank& self) -> std::string {
    const auto layer = cut_layer(self.group);
    const auto optimizer = step_of_ones(layer);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("model", layer).add("optimizer", *optimizer);
    if (checkpointer.load_latest() != 1) return "not loaded";
    return torch::equal(layer->weight, saved->weight) ? "" : "other values";
  });
  CHECK(faults[0].empty());
}

TEST_CASE("a cut model loads a file that has it whole", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto saved = save_whole_layer(folder.path());
  const auto faults = run_ranks<std::string>(2, [&](const Rank& self) -> std::string {
    const auto layer = cut_layer(self.group);
    torch::optim::SGD optimizer(layer->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("model", layer).add("optimizer", optimizer);
    checkpointer.load(1);
    const auto rows = saved->weight.chunk(2)[static_cast<size_t>(self.rank)];
    if (!torch::equal(layer->weight, rows)) return "other values";
    for (auto& p : layer->parameters()) p.mutable_grad() = torch::zeros_like(p);
    optimizer.step();  // moves by 0.1 times the 0.9 of a step of ones
    return torch::allclose(layer->weight, rows - 0.09) ? "" : "another state";
  });
  CHECK(faults == std::vector<std::string>(2));
}

TEST_CASE(
    "a cut model does not load a file of other sizes",
    "[parallel][cut_checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_whole_layer(folder.path());
  const bool has_optimizer = GENERATE(false, true);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    ddp::ColumnParallelLinear layer(  // a rank has as much of it as the file of the other layer
        ddp::ColumnParallelLinearOptions(4, 8).process_group(self.group), torch::ones({8, 4}),
        torch::ones({8}));
    const auto optimizer = step_of_ones(layer);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).strict(false));
    checkpointer.add("model", layer);
    if (has_optimizer) checkpointer.add("optimizer", *optimizer);
    checkpointer.load(1);
  });
  CHECK_THAT(
      errors, Each(Contains(
                  has_optimizer ? "expected momentum_buffer of weight of sizes [8, 4], got [4, 4]"
                                : "\"weight\" is [8, 4] in the model and [4, 4] in the file")));
}

TEST_CASE("any optimizer is saved where nothing is cut", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto steps = run_ranks<int64_t>(1, [&](const Rank& self) {
    const auto layer = cut_layer(self.group);
    torch::optim::LBFGS optimizer(layer->parameters());
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("model", layer).add("optimizer", optimizer);
    checkpointer.save(1);
    return checkpointer.load_latest().value_or(0);
  });
  CHECK(steps[0] == 1);
}

TEST_CASE(
    "an optimizer of parts is added as its model", "[parallel][cut_checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    const auto layer = cut_layer(self.group);
    const auto optimizer = step_of_ones(layer);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add_per_rank("model", layer).add("optimizer", *optimizer);
    checkpointer.save(1);
  });
  CHECK_THAT(errors, Each(Contains("add_per_rank() for the model. Add both by add()")));
}

TEST_CASE(
    "one rank's wrong layout is every rank's error", "[parallel][cut_checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    const auto model = std::make_shared<WrongModule>(self.group);
    const auto optimizer = step_of_ones(model);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("optimizer", *optimizer).add("model", *model);
    checkpointer.save(1);
  });
  CHECK_THAT(errors, Each(Contains("ParameterLayout: expected boxes of at most 2 elements")));
}

TEST_CASE(
    "groups of the same ranks have their own random numbers", "[parallel][cut_checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto faults = run_ranks<std::string>(1, [&](const Rank& self) -> std::string {
    const auto one = ddp::split_group(0, 0, self.group);
    const auto other = ddp::split_group(0, 0, self.group);
    const auto draw = [](const ddp::ProcessGroup& group) {
      const ddp::TensorParallelRng own(group);
      return torch::rand({4});
    };
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).background(false));
    draw(one);
    draw(other);
    draw(other);
    checkpointer.save(1);
    const auto next = draw(one), next_of_other = draw(other);
    checkpointer.load(1);
    if (!draw(one).equal(next)) return "the first group's";
    return draw(other).equal(next_of_other) ? "" : "the second group's";
  });
  CHECK(faults[0].empty());
}
