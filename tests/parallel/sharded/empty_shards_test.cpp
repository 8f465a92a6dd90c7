// Parameters without elements, and optimizers without those that have none on a rank.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "parallel/sharded/summoned.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;

namespace {

/// A layer, and a parameter without elements that its loss uses.
struct PartlyEmptyImpl : torch::nn::Module {
  explicit PartlyEmptyImpl(uint64_t seed) {
    to(torch::kDouble);
    draw_normal(*this, 0.5, seed);
  }
  at::Tensor forward(const at::Tensor& x) { return fc->forward(x).pow(2).sum() + empty.sum(); }
  at::Tensor empty = register_parameter("empty", torch::zeros({0, 4}));
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(5, 3))};
};
TORCH_MODULE(PartlyEmpty);

ddp::CheckpointerOptions checkpointer_options(const Rank& self) {
  return ddp::CheckpointerOptions().process_group(self.group).background(false);
}

std::vector<at::Tensor> without_empty(std::vector<at::Tensor> parameters) {
  parameters.erase(
      std::remove_if(
          parameters.begin(), parameters.end(), [](const auto& p) { return p.numel() == 0; }),
      parameters.end());
  return parameters;
}

/// Whole values after five steps that begin with a saved state, or the first one.
NamedValues after_steps(
    const Rank& self, const std::string& folder, bool saves, bool leaves_out_empty) {
  FullyShardedDataParallel model(PartlyEmpty(saves ? 1 : 2), over(self));
  auto parameters = model->parameters();
  if (leaves_out_empty) parameters = without_empty(parameters);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
  ddp::Checkpointer checkpointer(folder, checkpointer_options(self));
  checkpointer.add("model", model).add("optimizer", optimizer);
  if (!saves) checkpointer.load(3);
  for (int64_t step = saves ? 0 : 3; step < 5; ++step) {
    if (saves && step == 3) checkpointer.save(3);
    optimizer.zero_grad();
    model->forward(net_input(NetUse(), step, 0, 0)).backward();
    optimizer.step();
  }
  return summoned_values(*model);
}

}  // namespace

TEST_CASE("a parameter without elements is saved and loaded", "[ranks][sharded]") {
  const bool leaves_out_empty = GENERATE(true, false);
  const int ranks = GENERATE(1, 2, 3), others = GENERATE(1, 2, 4);
  const TemporaryFolder folder;
  const auto expected = run_ranks<NamedValues>(ranks, [&](const Rank& self) {
    return after_steps(self, folder.path(), true, leaves_out_empty);
  })[0];
  REQUIRE(expected.count("empty") == 1);
  const auto by_rank = run_ranks<NamedValues>(others, [&](const Rank& self) {
    return after_steps(self, folder.path(), false, leaves_out_empty);
  });
  for (const auto& values : by_rank) CHECK(largest_difference(values, expected) < 1e-12);
}

TEST_CASE("a parameter without elements is in whole states", "[ranks][sharded]") {
  const TemporaryFolder folder;
  const auto file = folder.path() + "/model.pt";
  run_ranks<int>(2, [&](const Rank& self) {
    FullyShardedDataParallel model(PartlyEmpty(1), over(self));
    ddp::Checkpointer checkpointer(folder.path() + "/run", checkpointer_options(self));
    checkpointer.add("model", model).save(1);
    const auto dict = ddp::full_state_dict(model, 0, self.group);
    TORCH_CHECK(self.rank > 0 || dict["empty"].sizes() == at::IntArrayRef({0, 4}));
    return 0;
  });
  ddp::consolidate_checkpoint(folder.path() + "/run", 1, file);
  run_ranks<int>(2, [&](const Rank& self) {
    FullyShardedDataParallel model(PartlyEmpty(2), over(self));
    ddp::load_full_state_dict(model, file, self.group);
    TORCH_CHECK(largest_difference(summoned_values(*model), named_values(*PartlyEmpty(1))) == 0);
    return 0;
  });
}
