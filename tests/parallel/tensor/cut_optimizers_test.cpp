// Every optimizer over parameters that layers or units cut, or stages share, beside one process in
// double: it steps them as whole ones, or throws before anything changes.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "parallel/tensor/cut_model.h"
#include "parallel/tied_net.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::cut_optimizers_test {
namespace {

using namespace testing;

using Tensors = std::vector<at::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<OptimizerPtr(const torch::nn::Module& model, const Tensors& parameters)>;

constexpr int kSteps = 3;

enum class CutOver { Nothing, Layers, Units, Both };

int ranks_of(CutOver cut) { return cut == CutOver::Nothing ? 1 : cut == CutOver::Both ? 4 : 2; }

struct Kind {
  std::string name;
  Make make;
  bool takes_matrices_alone = false;
};

template <typename Optimizer, typename Options>
Kind kind(const char* name, const Options& options) {
  return {name, [options](const torch::nn::Module& /*model*/, const Tensors& parameters) {
            return std::make_unique<Optimizer>(parameters, options);
          }};
}

/// Those that update each element on its own. Where a gradient is 0 but for rounding, eps keeps
/// the update small.
std::vector<Kind> elementwise() {
  namespace lib = torch::optim;
  std::vector<Kind> kinds{
      kind<lib::SGD>("SGD", lib::SGDOptions(0.1).momentum(0.9).weight_decay(0.01)),
      kind<lib::Adam>("Adam", lib::AdamOptions(0.02).eps(1e-3).amsgrad(true)),
      kind<lib::AdamW>("AdamW", lib::AdamWOptions(0.02).eps(1e-3).weight_decay(0.1)),
      kind<lib::Adagrad>("Adagrad", lib::AdagradOptions(0.02).eps(1e-3)),
      kind<lib::RMSprop>("RMSprop", lib::RMSpropOptions(0.02).eps(1e-3).momentum(0.5)),
      kind<optim::SGD>("fused SGD", lib::SGDOptions(0.1).momentum(0.9)),
      kind<optim::Adam>("fused Adam", lib::AdamOptions(0.02).eps(1e-3)),
      kind<optim::AdamW>("fused AdamW", lib::AdamWOptions(0.02).eps(1e-3)),
      kind<optim::Adagrad>("fused Adagrad", lib::AdagradOptions(0.02).eps(1e-3)),
      kind<optim::NAdam>("NAdam", optim::NAdamOptions(0.02).eps(1e-3)),
      kind<optim::RAdam>("RAdam", optim::RAdamOptions(0.02).eps(1e-3)),
      kind<optim::Adamax>("Adamax", optim::AdamaxOptions(0.02).eps(1e-3)),
      kind<optim::Adadelta>("Adadelta", optim::AdadeltaOptions(0.5).eps(1e-3)),
      kind<optim::Lion>("Lion", optim::LionOptions(0.01).weight_decay(0.1)),
  };
  kinds.back().takes_matrices_alone = true;  // the sign of a gradient that is 0 but for rounding
  return kinds;
}

optim::MuonOptions muon_options() {
  return optim::MuonOptions(0.02).eps(1e-3).ns_dtype(at::kDouble);
}

Kind lamb() { return kind<optim::LAMB>("LAMB", optim::LAMBOptions(0.02).eps(1e-3)); }

Kind muon_of_parameters() {
  auto muon = kind<optim::Muon>("Muon of parameters", muon_options());
  muon.takes_matrices_alone = true;
  return muon;
}

Kind muon_of_model() {
  return {
      "Muon of the model",
      [](const torch::nn::Module& model, const Tensors& parameters) {
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(parameters);
        return std::make_unique<optim::Muon>(model, groups, muon_options());
      },
      true};
}

Tensors taken_by(const Kind& kind, const torch::nn::Module& model) {
  if (kind.takes_matrices_alone) return optim::split_for_muon(model).matrices;
  return model.parameters();
}

/// The referee: the same optimizer over whole parameters.
OptimizerPtr alone(const Kind& kind, const torch::nn::Module& whole) {
  const bool is_muon = kind.name == muon_of_model().name;
  return (is_muon ? muon_of_parameters() : kind).make(whole, taken_by(kind, whole));
}

/// Steps `model` and the whole one; how far they are from each other then.
template <typename Model>
double distance_after_steps(Model& model, const Kind& kind) {
  WholeModel whole;
  const auto referee = alone(kind, *whole);
  const auto optimizer = kind.make(*model, taken_by(kind, *model));
  for (int step = 0; step < kSteps; ++step) {
    const auto tokens = tokens_of(step, 2);
    referee->zero_grad();
    whole->loss(tokens).backward();
    referee->step();
    optimizer->zero_grad();
    model->forward(tokens).backward();
    optimizer->step();
  }
  const auto moved = distance_from_whole(*model, WholeModel());
  return moved > 1e-3 ? distance_from_whole(*model, whole) : 1e300;
}

double distance_over(CutOver cut, const Kind& kind, const Rank& self) {
  const int layers = cut == CutOver::Layers || cut == CutOver::Both ? 2 : 1;
  const int units = cut == CutOver::Units || cut == CutOver::Both ? 2 : 1;
  const auto mesh = init_device_mesh({units, layers}, {"dp", "tp"}, self.group);
  CutModel model(WholeModel(), mesh.group("tp"));
  if (units == 1) return distance_after_steps(model, kind);
  FullyShardedDataParallel<CutModel> unit(
      model, FullyShardedOptions().process_group(mesh.group("dp")));
  return distance_after_steps(unit, kind);
}

std::vector<double> distances_over(CutOver cut, const Kind& kind) {
  return run_ranks<double>(
      ranks_of(cut), [&](const Rank& self) { return distance_over(cut, kind, self); });
}

std::vector<std::string> errors_over(CutOver cut, const Kind& kind) {
  return run_ranks<std::string>(ranks_of(cut), [&](const Rank& self) {
    return error_of([&] { distance_over(cut, kind, self); });
  });
}

/// The same of a pipeline of two stages that share a table.
double tied_distance(const Kind& kind, const Rank& self) {
  TiedRun run(self, TiedPlan{2, 1, 1, TiedWrapper::None});
  WholeTied whole(run.stages());
  const auto taken = [&](Tensors parameters) {
    if (kind.takes_matrices_alone) {
      const auto end = std::remove_if(
          parameters.begin(), parameters.end(), [](const auto& p) { return p.dim() != 2; });
      parameters.erase(end, parameters.end());
    }
    return parameters;
  };
  const auto referee = kind.make({}, taken(whole.parameters()));
  const auto optimizer = kind.make({}, taken(run.pipeline->parameters()));
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto batch = pipeline_batch(12, step);
    referee->zero_grad();
    optimizer->zero_grad();
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    run.step(batch);
    referee->step();
    optimizer->step();
  }
  return run.difference_from(whole);
}

}  // namespace

TEST_CASE("optimizers that update elements step parts as whole parameters", "[optim][ranks]") {
  const auto cut = GENERATE(CutOver::Layers, CutOver::Units, CutOver::Both);
  for (const auto& kind : elementwise()) {
    CAPTURE(static_cast<int>(cut), kind.name);
    for (const double distance : distances_over(cut, kind)) CHECK(distance < 1e-9);
  }
}

TEST_CASE("optimizers that need whole parameters refuse parts", "[optim][ranks][errors]") {
  const auto cut = GENERATE(CutOver::Layers, CutOver::Units, CutOver::Both);
  CAPTURE(static_cast<int>(cut));
  for (const auto& error : errors_over(cut, lamb())) {
    CHECK_THAT(
        error, ContainsText("ddp::optim::LAMB: expected whole parameters, got this rank's part of "
                            "one that is cut over ranks, of ["));
    CHECK_THAT(error, ContainsText("as ddp::optim::AdamW; or whole layers on every rank"));
  }
  for (const auto& error : errors_over(cut, muon_of_parameters())) {
    CHECK_THAT(error, ContainsText("Make it from the model: ddp::optim::Muon(*model, options)"));
  }
}

TEST_CASE("optimizers that need whole parameters step layers of one rank", "[optim][ranks]") {
  for (const auto& kind : {lamb(), muon_of_parameters()}) {
    CAPTURE(kind.name);
    CHECK(distances_over(CutOver::Nothing, kind)[0] < 1e-9);
  }
}

TEST_CASE("Muon made from the model steps parts as whole matrices", "[optim][ranks]") {
  const auto cut = GENERATE(CutOver::Layers, CutOver::Units);
  CAPTURE(static_cast<int>(cut));
  for (const double distance : distances_over(cut, muon_of_model())) CHECK(distance < 1e-9);
  for (const auto& error : errors_over(CutOver::Both, muon_of_model())) {
    CHECK_THAT(error, ContainsText("cut over one group, got 2"));
  }
}

TEST_CASE("every optimizer steps what stages of a pipeline share", "[optim][ranks]") {
  auto kinds = elementwise();
  kinds.push_back(lamb());
  kinds.push_back(muon_of_parameters());
  for (const auto& kind : kinds) {
    CAPTURE(kind.name);
    const auto distances =
        run_ranks<double>(2, [&](const Rank& self) { return tied_distance(kind, self); });
    for (const double distance : distances) CHECK(distance < 1e-9);
  }
}

namespace {

/// A program's own layer, with a half of the rows.
struct OwnLayer : torch::nn::Module, ShardedModule {
  explicit OwnLayer(const Rank& self) : group(self.group), rank(self.rank) {
    weight = register_parameter("weight", torch::ones({3, 4}, torch::kDouble));
  }
  std::vector<ParameterLayout> layouts() override {
    ParameterLayout layout;
    layout.name = "weight";
    layout.sizes = {6, 4};
    layout.dtype = at::kDouble;
    layout.local = weight;
    layout.boxes = {{{3 * rank, 0}, {3, 4}}};
    layout.sharded_over = {group};
    return {layout};
  }
  ProcessGroup group;
  int64_t rank;
  at::Tensor weight;
};

}  // namespace

TEST_CASE("LAMB refuses parts of a program's own layers, before a step", "[optim][ranks][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    const auto layer = std::make_shared<OwnLayer>(self);
    const auto model = clip_grad_norm_(*layer, 1.0);  // walks over the layouts
    layer->weight.mutable_grad() = torch::ones({3, 4}, torch::kDouble);
    optim::LAMB lamb(layer->parameters());
    auto error = error_of([&] { lamb.step(); });
    const bool is_as_before = layer->weight.eq(1).all().item<bool>() && lamb.state().empty();
    return model == 0 && is_as_before ? error : "changed";
  });
  for (const auto& error : errors) {
    CHECK_THAT(error, ContainsText("ddp::optim::LAMB: expected whole parameters"));
  }
}

}  // namespace ddp::cut_optimizers_test
