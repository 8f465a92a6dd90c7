// The whole state of a model in stages: ranks with other parameters and buffers.
#include <string>

#include <ddp/ddp.h>

#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

/// A parameter that the stage's ranks cut, and a buffer that each has.
struct Stage : torch::nn::Module, ddp::ShardedModule {
  Stage(const ddp::ProcessGroup& group, const std::string& name, const std::string& buffer) {
    auto block = register_module(name, std::make_shared<torch::nn::Module>());
    layout.name = name + ".weight";
    layout.sizes = {4};
    layout.boxes = {{{2 * group->getRank()}, {2}}};
    layout.sharded_over = {group};
    layout.local = block->register_parameter("weight", torch::ones({2}));
    block->register_buffer(buffer, torch::full({3}, double(name.size())));
  }
  std::vector<ddp::ParameterLayout> layouts() override { return {layout}; }
  ddp::ParameterLayout layout;
};

}  // namespace

TEST_CASE(
    "stages may have other buffers, and ranks of one stage may not",
    "[parallel][full_state][ranks][errors]") {
  // Ranks 0 and 1 have the first stage, and ranks 2 and 3 the second.
  const auto whole = [](int other_rank) {
    return [=](const Rank& self) {
      const bool is_first = self.rank < 2;
      const auto ranks = ddp::split_group(is_first ? 0 : 1, self.rank, self.group);
      Stage stage(ranks, is_first ? "stem" : "output", self.rank == other_rank ? "other" : "mean");
      auto dict = ddp::full_state_dict(stage, 0, self.group);
      auto more = Dict();
      for (const auto& item : dict) more.insert(item.key(), item.value() + 1);
      ddp::load_full_state_dict(stage, more, self.group);
      return ddp::full_state_dict(stage, 3, self.group);
    };
  };
  const auto dict = run_ranks<Dict>(4, whole(-1))[3];
  CHECK(dict.size() == 4);
  CHECK(torch::equal(dict["stem.weight"], torch::full({4}, 2.0F)));
  CHECK(torch::equal(dict["stem.mean"], torch::full({3}, 5.0F)));
  CHECK(torch::equal(dict["output.mean"], torch::full({3}, 7.0F)));
  for (const auto& error : errors_of_ranks(4, [&](const Rank& self) { whole(3)(self); })) {
    CHECK_THAT(
        error,
        ContainsText("rank 3 of 4 lacks rank 2's \"output.mean\", and has \"output.other\""));
  }
}
