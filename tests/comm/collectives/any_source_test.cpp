// A recv from any rank, and the ranks that recv and send refuse.
#include <ddp/collectives.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/registry.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kFewElements = 10, kManyElements = 100000;  // Gloo sends these apart

static_assert(
    std::is_same_v<decltype(ddp::recv(std::declval<at::Tensor&>(), 1)), int>,
    "the sender, also of a call that names it");

}  // namespace

TEST_CASE("recv without a source takes any rank's message, and names it", "[comm][ranks]") {
  const auto numel = GENERATE(kFewElements, kManyElements);
  const bool async = GENERATE(false, true);
  CAPTURE(numel, async);
  const auto senders = run_ranks<std::vector<int>>(3, [&](const Rank& self) {
    std::vector<int> seen;
    if (self.rank > 0) {
      ddp::send(at::full({numel}, -1, at::kInt), 0, 6, self.group);
      for (int i = 0; i < 2; ++i) {
        ddp::send(at::full({numel}, self.rank, at::kInt), 0, 5, self.group);
      }
      return seen;
    }
    auto strided = at::zeros({numel, 2}, at::kInt).t()[0];
    const auto check = [&](int sender) {
      TORCH_CHECK(strided.eq(sender).all().item<bool>(), "another rank's message");
      seen.push_back(sender);
    };
    auto with_other_tag = at::zeros({numel}, at::kInt);
    TORCH_CHECK(ddp::recv(with_other_tag, 1, 6, self.group) == 1);
    ddp::recv(with_other_tag, 2, 6, self.group);
    for (int i = 0; i < 4; ++i) {
      if (!async) {
        check(ddp::recv(strided, std::nullopt, 5, self.group));
        continue;
      }
      const auto work = ddp::recv_async(strided, std::nullopt, 5, self.group);
      work->wait();
      check(work->sourceRank());
    }
    std::sort(seen.begin(), seen.end());
    return seen;
  });
  CHECK(senders[0] == std::vector<int>{1, 1, 2, 2});
}

TEST_CASE("in a subgroup the sender is a rank of the subgroup", "[comm][ranks]") {
  const auto senders = run_ranks<int>(3, [](const Rank& self) {
    const auto group = ddp::new_group({0, 2}, self.group);
    auto tensor = at::full({3}, self.rank);
    if (self.rank == 2) ddp::send(tensor, 0, group);
    return self.rank == 0 ? ddp::recv(tensor, std::nullopt, group) : 0;
  });
  CHECK(senders[0] == 1);
}

TEST_CASE("a recv from any rank ends with the timeout if none sends", "[comm][ranks][errors]") {
  RanksOptions soon;
  soon.collective_timeout = 300ms;
  const auto errors = errors_of_ranks(2, soon, [](const Rank& self) {
    auto tensor = at::zeros({2});
    if (self.rank == 0) ddp::recv(tensor, std::nullopt, 7, self.group);
    self.wait_until_others_end();
  });
  CHECK_THAT(
      errors[0], ContainsText("recv from any rank with tag 7 failed on rank 0 of 2") &&
                     (ContainsText("timed out") || ContainsText("Timed out")));
}

TEST_CASE("a recv from any rank of another size is an error", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    auto tensor = at::zeros({2 + self.rank});
    self.rank == 0 ? void(ddp::recv(tensor, std::nullopt, self.group))
                   : ddp::send(tensor, 0, self.group);
    self.wait_until_others_end();
  });
  CHECK_THAT(
      errors[0],
      ContainsText("recv: expected a message of 2 x Float from rank 1 with tag 0, got 3"));
}

TEST_CASE("ranks that no message can come from or go to are refused", "[comm][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(3, [](const Rank& self) {
    auto t = at::zeros({2});
    std::vector<std::string> texts;
    for (const int rank : {3, -1, self.rank}) {
      texts.push_back(error_of<c10::ValueError>([&] { ddp::recv(t, rank, 0, self.group); }));
      texts.push_back(error_of<c10::ValueError>([&] { ddp::send(t, rank, 0, self.group); }));
    }
    texts.push_back(error_of<c10::ValueError>([&] { ddp::recv(t, std::nullopt, -2, self.group); }));
    ddp::barrier(self.group);  // the group still works
    return texts;
  });
  const auto& of_rank_1 = errors[1];
  for (size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    const std::string call = i % 2 == 0 ? "recv: expected src " : "send: expected dst ";
    const std::string rule = i < 4 ? "to be a rank of the group, 0 to 2, got "
                                   : "to be another rank, got this one on rank 1 of 3";
    CHECK_THAT(of_rank_1[i], ContainsText(call + rule) && !ContainsText("Python"));
  }
  CHECK_THAT(of_rank_1[6], ContainsText("recv: expected a tag of 0 to"));
}

TEST_CASE(
    "ranks of the world in a subgroup are told from those of the group", "[comm][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(3, [](const Rank& self) {
    const auto group = ddp::new_group({1, 2}, self.group);
    std::vector<std::string> texts;
    if (self.rank != 2) return texts;
    auto t = at::zeros({2});
    texts.push_back(error_of([&] { ddp::recv(t, 2, group); }));
    texts.push_back(error_of([&] { ddp::recv(t, 1, group); }));  // itself, who meant the other one
    texts.push_back(error_of([&] { ddp::broadcast(t, 2, group); }));
    return texts;
  });
  CHECK_THAT(
      errors[2][0],
      ContainsText("got 2 on rank 1 of 2. Count ranks as get_rank() of that group does. "
                   "Python counts ranks in the world, where rank 2 is rank 1 of this "
                   "group."));
  CHECK_THAT(
      errors[2][1], ContainsText("got this one on rank 1 of 2") &&
                        ContainsText("in the world, where rank 1 is rank 0 of this group."));
  CHECK_THAT(errors[2][2], ContainsText("in the world, where rank 2 is rank 1 of this group."));
}

TEST_CASE("a recv from any rank in a group of one is refused", "[comm][errors]") {
  const auto group = ddp::make_process_group(ddp::ProcessGroupOptions()
                                                 .backend("gloo")
                                                 .store(c10::make_intrusive<c10d::HashStore>())
                                                 .rank(0)
                                                 .world_size(1));
  auto tensor = at::zeros({2});
  CHECK_THAT(
      error_of<c10::ValueError>([&] { ddp::recv(tensor, std::nullopt, group); }),
      ContainsText("recv: expected another rank of the group to receive from, got a group of one"));
}

TEST_CASE("a backend without receives from any rank is named", "[comm][ranks][errors][gloo]") {
  ddp::backends::RegisteredBackend named_only;
  named_only.name = "named_only";
  named_only.devices = {"cpu"};
  named_only.capabilities = [] {
    ddp::BackendCapabilities capabilities;
    capabilities.receives_from_any = false;  // as NCCL's
    return capabilities;
  };
  named_only.make = ddp::backends::make_gloo;
  named_only.is_own = true;
  ddp::backends::add(named_only);
  const auto errors = run_ranks<std::string>(2, over("named_only"), [](const Rank& self) {
    auto tensor = at::ones({2});
    const auto error =
        error_of<c10::ValueError>([&] { ddp::recv(tensor, std::nullopt, self.group); });
    self.rank == 0 ? ddp::send(tensor, 1, self.group)  // the group still works
                   : void(ddp::recv(tensor, 0, self.group));
    return error;
  });
  CHECK_THAT(
      errors[0],
      ContainsText(
          "recv: expected a rank in src, for backend named_only cannot receive from any "
          "rank, got std::nullopt on rank 0 of 2. Name the sender, or receive a CPU tensor"));
}
