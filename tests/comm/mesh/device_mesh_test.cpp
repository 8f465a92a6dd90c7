#include <chrono>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <ddp/collectives.h>
#include <ddp/device_mesh.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using ddp::DeviceMesh;
using ddp::init_device_mesh;
using namespace ddp::testing;

namespace {

// The sum of the members' ranks in the whole group.
double sum_of_ranks(const ddp::ProcessGroup& group, int own) {
  auto sum = at::full({3}, static_cast<double>(own), at::kDouble);
  ddp::all_reduce(sum, c10d::ReduceOp::SUM, group);
  return sum[2].item<double>();
}

DeviceMesh mesh_of(const Rank& self, std::vector<int64_t> shape) {
  std::vector<std::string> names{"pp", "dp", "tp"};
  names.erase(names.begin(), names.end() - static_cast<std::ptrdiff_t>(shape.size()));
  return init_device_mesh(std::move(shape), names, self.group);
}

}  // namespace

TEST_CASE("each axis of a mesh has its groups", "[comm][mesh][ranks][many]") {
  const auto sums = run_ranks<std::vector<double>>(8, [](const Rank& self) {
    const auto mesh = mesh_of(self, {2, 2, 2});
    std::vector<double> sums;
    for (const auto* dim : {"pp", "dp", "tp"}) {
      sums.push_back(sum_of_ranks(mesh.group(dim), self.rank));
      if (mesh.group(dim)->getRank() != mesh.rank(dim)) sums.push_back(-1);
      if (mesh.group(dim)->getSize() != mesh.size(dim)) sums.push_back(-2);
    }
    return sums;
  });
  for (int rank = 0; rank < 8; ++rank) {
    // The other member of each axis differs in one bit.
    const std::vector<double> expected{
        2.0 * rank + (rank & 4 ? -4 : 4), 2.0 * rank + (rank & 2 ? -2 : 2),
        2.0 * rank + (rank & 1 ? -1 : 1)};
    CHECK(sums[static_cast<size_t>(rank)] == expected);
  }
}

TEST_CASE("a mesh of one axis is its group", "[comm][mesh][ranks][errors]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    const auto mesh = mesh_of(self, {1, 2});
    if (sum_of_ranks(mesh[{"tp"}], self.rank) != 1) return "sum";
    if (ddp::GroupArg(mesh[{"tp"}]).get() != mesh.group("tp")) return "group";
    return error_of([&] { ddp::barrier(mesh); });
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        faults[rank], Contains(
                          "DeviceMesh: expected a mesh of one axis in place of a group, got 2 axes "
                          "(dp, tp) on rank " +
                          std::to_string(rank) +
                          " of 2. Name one, mesh[{\"dp\"}], or give "
                          "flatten()'s group of several."));
  }
}

TEST_CASE("meshes of some axes share groups", "[comm][mesh][ranks]") {
  const auto faults = run_ranks<std::string>(4, [](const Rank& self) -> std::string {
    const auto mesh = mesh_of(self, {2, 1, 2});
    const auto part = mesh[{"pp", "tp"}];
    if (part.group("tp") != mesh.group("tp")) return "another group";
    if (part.names() != std::vector<std::string>{"pp", "tp"}) return "names";
    if (part.shape() != std::vector<int64_t>{2, 2}) return "shape";
    if (part.coordinate() != std::vector<int>{self.rank / 2, self.rank % 2}) return "coordinate";
    if (part.rank_at({1, 0}) != 2) return "rank_at";
    // The other axes stay where this rank is.
    if (mesh[{"tp"}].rank_at({1}) != self.rank / 2 * 2 + 1) return "rank_at in an axis";
    return "";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE("axes of a mesh become one group", "[comm][mesh][ranks][many]") {
  const auto sums = run_ranks<double>(8, [](const Rank& self) {
    const auto mesh = mesh_of(self, {2, 2, 2});
    const auto both = mesh.flatten({"pp", "tp"});
    if (mesh.flatten({"pp", "tp"}) != both || mesh[{"pp", "tp"}].flatten({"pp", "tp"}) != both) {
      return -1.0;  // made again
    }
    if (both->getRank() != mesh.rank("pp") * 2 + mesh.rank("tp")) return -2.0;
    if (mesh.flatten({"dp"}) != mesh.group("dp")) return -3.0;
    if (mesh.flatten({"pp", "dp", "tp"}) != self.group) return -4.0;
    return sum_of_ranks(both, self.rank);
  });
  for (size_t rank = 0; rank < 8; ++rank) CHECK(sums[rank] == (rank & 2 ? 2 + 3 + 6 + 7 : 10));
}

TEST_CASE("an axis of size 1 has collectives without a connection", "[comm][mesh][ranks]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    const auto mesh = mesh_of(self, {1, 2, 1});
    const auto alone = mesh.group("tp");
    if (alone->getSize() != 1 || mesh.rank("tp") != 0) return "size";
    auto sum = at::full({4}, 2.0);
    for (const auto& op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MAX}) {
      ddp::all_reduce(sum, op, alone);
    }
    ddp::broadcast(sum, 0, alone);
    if (!sum.eq(2).all().item<bool>()) return "all_reduce";
    auto gathered = at::full({4}, 0.0);
    ddp::all_gather_into_tensor(gathered, sum, alone);
    if (!gathered.equal(sum)) return "all_gather_into_tensor";
    auto part = at::full({4}, 0.0);
    ddp::reduce_scatter_tensor(part, sum, c10d::ReduceOp::SUM, alone);
    if (!part.equal(sum)) return "reduce_scatter_tensor";
    std::vector<at::Tensor> list{at::full({4}, 0.0)};
    ddp::all_gather(list, sum, alone);
    if (!list[0].equal(sum)) return "all_gather";
    list[0].zero_();
    ddp::all_to_all(list, {sum}, alone);
    if (!list[0].equal(sum)) return "all_to_all";
    list[0].zero_();
    ddp::gather(list, sum, 0, alone);
    if (!list[0].equal(sum)) return "gather";
    part.zero_();
    ddp::scatter(part, list, 0, alone);
    if (!part.equal(sum)) return "scatter";
    ddp::barrier(alone);
    if (ddp::all_gather_strings("text", alone) != std::vector<std::string>{"text"})
      return "strings";
    return sum_of_ranks(mesh.group("dp"), self.rank) == 1 ? "" : "dp";
  });
  CHECK(faults == std::vector<std::string>(2));
}

TEST_CASE("a bad mesh is an error on every rank", "[comm][mesh][ranks][errors]") {
  struct Bad {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    const char* text;
  };
  const auto bad = GENERATE(
      Bad{{2, 2},
          {"dp", "tp"},
          "product 2, the group's size, got {2, 2} of dp, tp, whose product is 4"},
      Bad{{2, 0}, {"dp", "tp"}, "expected sizes of at least 1, got {2, 0}"},
      Bad{{-1, -2}, {"dp", "tp"}, "expected sizes of at least 1"},
      Bad{{int64_t{1} << 62, 4}, {"dp", "tp"}, "expected a shape with product 2"},
      Bad{{2}, {"dp", "tp"}, "got 1 sizes and 2 names"},
      Bad{{}, {}, "expected a name for each axis"}, Bad{{2, 1}, {"dp", "dp"}, "got \"dp\" twice"},
      Bad{{2, 1}, {"dp", ""}, "got \"\" for axis 1"});
  const auto errors = errors_of_ranks(
      2, [&](const Rank& self) { init_device_mesh(bad.shape, bad.names, self.group); });
  for (const auto& error : errors) CHECK_THAT(error, Contains(bad.text));
}

TEST_CASE(
    "ranks with different meshes get an error, and the group goes on",
    "[comm][mesh][ranks][errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    auto error = error_of<c10::Error>([&] {
      init_device_mesh(
          self.rank == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 1}, {"dp", "tp"},
          self.group);
    });
    return error + (sum_of_ranks(self.group, self.rank) == 1 ? "" : " broken");
  });
  CHECK_THAT(
      errors,
      Each(
          Contains("rank 0 calls it with {1, 2} of dp, tp and rank 1 with {2, 1} of dp, tp") &&
          !Contains("broken")));
}

TEST_CASE("a mesh names axes that it lacks", "[comm][mesh][ranks][errors]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    const auto mesh = mesh_of(self, {1, 2});
    const auto part = mesh[{"tp"}];
    using Names = std::vector<std::string>;
    return std::vector<std::string>{
        error_of<c10::ValueError>([&] { mesh.group("pp"); }),
        error_of<c10::ValueError>([&] { part.rank("dp"); }),
        error_of<c10::ValueError>([&] {
          mesh[Names{"tp", "dp"}];
        }),
        error_of<c10::ValueError>([&] { mesh[Names{}]; }),
        error_of<c10::ValueError>([&] {
          mesh.flatten(Names{"tp", "tp"});
        }),
        error_of<c10::ValueError>([&] { mesh.rank_at({0}); }),
        error_of<c10::ValueError>([&] {
          mesh.rank_at({0, 2});
        })};
  });
  for (const auto& texts : errors) {
    CHECK_THAT(texts[0], Contains("expected one of the axes dp, tp, got \"pp\""));
    CHECK_THAT(texts[1], Contains("expected one of the axes tp, got \"dp\""));
    CHECK_THAT(texts[2], Contains("in the order of dp, tp, got tp, dp"));
    CHECK_THAT(texts[3], Contains("got none"));
    CHECK_THAT(texts[4], Contains("got tp, tp"));
    CHECK_THAT(texts[5], Contains("for each of the 2 axes, got 1"));
    CHECK_THAT(texts[6], Contains("expected 0 to 1 on axis tp, got 2"));
  }
}

TEST_CASE(
    "a rank that throws ends its peers on every axis of a mesh", "[comm][mesh][ranks][errors]") {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(4, kLongTimeout, [](const Rank& self) {
    const auto mesh = mesh_of(self, {2, 2});
    if (self.rank == 3) throw std::runtime_error("no more data");
    // Rank 1 waits for rank 3 on dp, rank 2 on tp; rank 0 waits for both of them.
    auto sum = at::full({1}, 1.0);
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, mesh.group(self.rank == 1 ? "dp" : "tp"));
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, mesh.group("dp"));
  });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
  for (size_t rank : {0, 1, 2}) {
    INFO(errors[rank]);
    CHECK_THAT(errors[rank], Contains("rank 3 of 4 (dp 1, tp 1)"));
  }
}

TEST_CASE("a group made of an axis names coordinates", "[comm][mesh][ranks][errors]") {
  const auto errors = errors_of_ranks(4, kLongTimeout, [](const Rank& self) {
    const auto mesh = mesh_of(self, {2, 2});
    const auto made = ddp::new_group({0, 1}, mesh.group("dp"));
    if (self.rank == 3) throw std::runtime_error("no more data");
    ddp::barrier(self.rank == 1 ? made : mesh.group("tp"));
    ddp::barrier(made);
  });
  for (size_t rank : {0, 1, 2}) {
    INFO(errors[rank]);
    CHECK_THAT(errors[rank], Contains("rank 3 of 4 (dp 1, tp 1)"));
  }
}
