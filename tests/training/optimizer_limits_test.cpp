// Where the optimizers that LibTorch lacks refuse a step, before anything changes: joins, gradients
// that some ranks lack, added groups, archives of others.
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

#include "support/catch.h"

namespace ddp::optimizer_limits_test {
namespace {

using namespace testing;

using Tensors = std::vector<at::Tensor>;
using Net = torch::nn::Sequential;
using Wrapped = DistributedDataParallel<Net>;

Net two_matrices() {
  using torch::nn::Linear;
  using torch::nn::LinearOptions;
  Net net(
      Linear(LinearOptions(5, 6).bias(false)), torch::nn::Tanh(),
      Linear(LinearOptions(6, 3).bias(false)));
  set_waves(*net, {1, 1});
  net->to(torch::kDouble);
  return net;
}

DistributedDataParallelOptions over_ranks(const Rank& self) {
  return DistributedDataParallelOptions().process_group(self.group).check_inputs(false);
}

at::Tensor waves_of(int64_t rows, int step) {
  return torch::cos(torch::arange(5.0 * static_cast<double>(rows), torch::kDouble) * (step + 1))
      .view({rows, 5});
}

enum class In { Step, Backward, ZeRO, EarlyEnd, Alone };

/// Trains in a join, in which rank r has r + 1 batches, or each has two.
Tensors joined_with_muon(const Rank& self, In in) {
  const auto net = two_matrices();
  Wrapped model(net, over_ranks(self));
  const auto options = optim::MuonOptions(0.02).ns_dtype(at::kDouble);
  std::shared_ptr<torch::optim::Optimizer> muon;
  std::vector<Joinable*> joinables{model.get()};
  JoinOptions join_options;
  if (in == In::ZeRO) {
    const auto sharded =
        std::make_shared<ZeroRedundancyOptimizer<optim::Muon>>(model, options, ZeroOptions());
    joinables.push_back(sharded.get());
    muon = sharded;
  } else if (in == In::Alone) {
    muon = std::make_shared<optim::Muon>(optim::split_for_muon(*model).matrices, options);
    join_options.optimizers({muon.get()});
  } else {
    muon = std::make_shared<optim::Muon>(*model, options);
  }
  if (in == In::Backward) model->step_in_backward(muon);
  join_options.throw_on_early_termination(in == In::EarlyEnd);
  const int batches = in == In::EarlyEnd ? 2 : self.rank + 1;
  join(
      joinables,
      [&] {
        for (int step = 0; step < batches; ++step) {
          muon->zero_grad();
          model->forward(waves_of(4, step + self.rank)).square().mean().backward();
          if (in != In::Backward) muon->step();
        }
      },
      join_options);
  return copies_of(net->parameters());
}

}  // namespace

TEST_CASE("Muon made from a model refuses a join that goes on", "[optim][ranks][errors]") {
  const auto errors =
      errors_of_ranks(3, [](const Rank& self) { joined_with_muon(self, In::Step); });
  for (const auto& error : errors) {
    CHECK_THAT(error, ContainsText("got a step of a Muon made from a model in one that goes on"));
    CHECK_THAT(error, ContainsText("Take ZeroRedundancyOptimizer<ddp::optim::Muon>"));
    CHECK_THAT(
        error, ContainsText("ddp::optim::Muon(ddp::optim::split_for_muon(*model).matrices)"));
  }
}

TEST_CASE("the ways in which Muon joins", "[optim][ranks]") {
  const auto in = GENERATE(In::Backward, In::ZeRO, In::EarlyEnd, In::Alone);
  CAPTURE(static_cast<int>(in));
  const auto ends =
      run_ranks<Tensors>(3, [&](const Rank& self) { return joined_with_muon(self, in); });
  for (const auto& end : ends) CHECK(all_equal(end, ends[0]));
  CHECK(largest_difference(ends[0], copies_of(two_matrices()->parameters())) > 1e-3);
}

TEST_CASE("a Muon whose groups have one rank steps in any join", "[optim][ranks]") {
  const auto errors =
      errors_of_ranks(1, [](const Rank& self) { joined_with_muon(self, In::Step); });
  CHECK(errors[0].empty());
}

TEST_CASE("Muon compares gradients before anything changes", "[optim][ranks][errors]") {
  const bool is_sharded = GENERATE(false, true);
  CAPTURE(is_sharded);
  // One matrix steps in another dtype, before the one whose gradient rank 1 lacks.
  const auto changes = run_ranks<std::string>(2, [&](const Rank& self) {
    auto net = two_matrices();
    std::shared_ptr<torch::nn::Module> model;
    const auto passed = waves_of(4, self.rank);
    if (is_sharded) {
      fully_shard_children(net, FullyShardedOptions().process_group(self.group));
      FullyShardedDataParallel<Net> whole(net, FullyShardedOptions().process_group(self.group));
      whole->forward(passed).square().mean().backward();
      model = whole.ptr();
    } else {
      Wrapped whole(net, over_ranks(self));
      whole->forward(passed).square().mean().backward();
      model = whole.ptr();
    }
    const auto matrices = optim::split_for_muon(*model).matrices;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(
        Tensors{matrices[0]},
        std::make_unique<optim::MuonOptions>(optim::MuonOptions().ns_dtype(at::kFloat)));
    groups.emplace_back(
        Tensors{matrices[1]},
        std::make_unique<optim::MuonOptions>(optim::MuonOptions().ns_dtype(at::kDouble)));
    optim::Muon muon(*model, groups);
    if (self.rank == 1) matrices[1].mutable_grad().reset();
    const auto before = copies_of(matrices);
    const auto error = error_of([&] { muon.step(); });
    const bool is_as_before = all_equal(copies_of(matrices), before) && muon.state().empty();
    return std::string(is_as_before ? "" : "changed; ") + error;
  });
  for (const auto& change : changes) {
    CHECK_THAT(change, ContainsText("weight\" or none, got one on rank 0 and none on rank 1"));
    CHECK(change.find("changed") == std::string::npos);
  }
}

namespace {

/// The error of the step of an optimizer of one matrix after a group was added; begins with
/// whether the matrix has stepped.
template <typename Optimizer, typename Options>
std::string error_of_added(const torch::optim::OptimizerParamGroup& group, const Options& options) {
  const auto matrix = torch::ones({2, 3});
  matrix.mutable_grad() = torch::ones({2, 3});
  for (const auto& p : group.params()) p.mutable_grad() = torch::ones_like(p);
  Optimizer optimizer(Tensors{matrix}, options);
  optimizer.add_param_group(group);
  const auto error = error_of([&] { optimizer.step(); });
  return std::string(torch::equal(matrix, torch::ones({2, 3})) ? "unchanged: " : "changed: ") +
         error;
}

template <typename Options>
torch::optim::OptimizerParamGroup group_of(const at::Tensor& parameter, const Options& options) {
  return {Tensors{parameter}, std::make_unique<Options>(options)};
}

}  // namespace

TEST_CASE("a step refuses a wrong group that was added", "[optim][pure][errors]") {
  const auto matrix = torch::zeros({4, 2});
  CHECK_THAT(
      error_of_added<optim::Muon>(
          torch::optim::OptimizerParamGroup(Tensors{torch::zeros({3})}), optim::MuonOptions()),
      ContainsText(
          "unchanged: ddp::optim::Muon: expected parameters of two dimensions, got one of [3] in "
          "group 1"));
  CHECK_THAT(
      error_of_added<optim::Muon>(group_of(matrix, optim::MuonOptions(-1)), optim::MuonOptions()),
      ContainsText("unchanged: ddp::optim::Muon: expected lr >= 0, got -1 in group 1"));
  CHECK_THAT(
      error_of_added<optim::Lion>(group_of(matrix, optim::LionOptions(-1)), optim::LionOptions()),
      ContainsText("unchanged: ddp::optim::Lion: expected lr >= 0, got -1 in group 1"));
  CHECK_THAT(
      error_of_added<optim::NAdam>(
          group_of(matrix, torch::optim::SGDOptions(0.1)), optim::NAdamOptions()),
      ContainsText(
          "unchanged: ddp::optim::NAdam: expected options of this optimizer, got another one's in "
          "group 1. Pass ddp::optim::NAdamOptions"));
  CHECK_THAT(
      error_of_added<optim::Muon>(group_of(matrix, optim::LionOptions(0.1)), optim::MuonOptions()),
      ContainsText(
          "unchanged: ddp::optim::Muon: expected options of this optimizer, got another one's"));
  CHECK(
      error_of_added<optim::Muon>(
          group_of(matrix, optim::MuonOptions(0.5)), optim::MuonOptions()) == "changed: ");
}

TEST_CASE("an optimizer's archive loads into its own class", "[optim][pure][errors]") {
  const Tensors parameters{torch::zeros({2, 2})};
  parameters[0].mutable_grad() = torch::ones({2, 2});
  optim::NAdam nadam(parameters);
  nadam.step();
  std::stringstream archive;
  torch::save(nadam, archive);
  const auto error_into = [&](torch::optim::Optimizer&& optimizer) {
    archive.clear();
    archive.seekg(0);
    return error_of([&] { torch::load(optimizer, archive); });
  };
  CHECK_THAT(
      error_into(optim::Lion(parameters)),
      ContainsText(
          "ddp::optim::Lion: expected an archive of its own, got one of ddp::optim::NAdam"));
  CHECK_THAT(error_into(optim::RAdam(parameters)), ContainsText("got one of ddp::optim::NAdam"));
  CHECK(error_into(optim::NAdam(parameters)).empty());
}

}  // namespace ddp::optimizer_limits_test
