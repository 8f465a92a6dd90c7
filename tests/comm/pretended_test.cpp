// A rank of a job whose other ranks do not exist.
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <catch2/catch.hpp>

#include <ddp/internal/pretended.h>

#include "pretend/present_ranks.h"
#include "support/error_of.h"

using namespace ddp;
using c10d::ReduceOp;
using Catch::Contains;
using ddp::testing::error_of;

namespace {

class Pretended {
 public:
  explicit Pretended(const std::string& present) {
    ::setenv("DDP_PRETEND", present.c_str(), /*overwrite=*/1);
  }
  ~Pretended() { ::unsetenv("DDP_PRETEND"); }
  Pretended(const Pretended&) = delete;
  Pretended& operator=(const Pretended&) = delete;
};

ProcessGroup group_of(int rank, int size, const std::string& backend = "") {
  return make_process_group(ProcessGroupOptions().rank(rank).world_size(size).backend(backend));
}

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.to(at::kDouble).contiguous().view({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

using Values = std::vector<double>;

Lookup lookup(const std::string& present) {
  return [present](const std::string& name) -> std::optional<std::string> {
    if (name == "DDP_PRETEND") return present;
    if (name == "RANK") return "7";
    if (name == "WORLD_SIZE") return "16";
    return std::nullopt;
  };
}

}  // namespace

TEST_CASE("DDP_PRETEND lists the ranks that are processes", "[comm][pretend][once]") {
  const auto pretended = read_pretended_rank(lookup("0,7,15"));
  REQUIRE(pretended);
  CHECK(pretended->rank == 7);
  CHECK(pretended->world_size == 16);
  CHECK(pretended->present == std::vector<int>{0, 7, 15});
  CHECK(pretended->is_present(15));
  CHECK_FALSE(pretended->is_present(14));
  CHECK_FALSE(read_pretended_rank(lookup("")));
  const auto error = [](const std::string& present, int rank = -1) {
    return error_of([&] { read_pretended_rank(lookup(present), rank); });
  };
  CHECK_THAT(error("0,16"), Contains("DDP_PRETEND: expected a number from 0 to 15, got \"16\""));
  CHECK_THAT(error("7,x"), Contains("DDP_PRETEND: expected a whole number"));
  CHECK_THAT(error("7,7"), Contains("DDP_PRETEND: expected ascending ranks, each once"));
  CHECK_THAT(error("7", 3), Contains("expected this process's rank, 3 of 16, in the list"));
}

TEST_CASE(
    "collectives of a pretended rank have the values of equal ranks", "[comm][pretend][once]") {
  const Pretended alone("7");
  const auto backend = GENERATE(std::string("gloo"), std::string("shm"), std::string());
  const auto group = group_of(7, 1000, backend);
  const auto reduced = [&](ReduceOp op, double value) {
    auto tensor = at::full({2}, value, at::kDouble);
    all_reduce(tensor, op, group);
    return values(tensor);
  };
  CHECK(reduced(ReduceOp::SUM, 3) == Values{3000, 3000});
  CHECK(reduced(ReduceOp::AVG, 3) == Values{3, 3});
  CHECK(reduced(ReduceOp::MIN, 3) == Values{3, 3});
  CHECK(reduced(ReduceOp::MAX, 3) == Values{3, 3});
  CHECK(reduced(ReduceOp::PRODUCT, -1) == Values{1, 1});
  auto bits = at::full({1}, 5, at::kInt);
  all_reduce(bits, ReduceOp::BXOR, group);
  CHECK(values(bits) == Values{0});

  const auto own = at::arange(2, at::kFloat) + 1;
  auto whole = at::zeros({2000});
  all_gather_into_tensor(whole, own, group);
  CHECK(at::equal(whole, own.repeat({1000})));
  std::vector<at::Tensor> each(1000);
  for (auto& of_rank : each) of_rank = at::zeros({2});
  all_gather(each, own, group);
  CHECK(at::equal(each.back(), own));
  auto part = at::zeros({2});
  reduce_scatter_tensor(part, at::arange(2000, at::kFloat), ReduceOp::SUM, group);
  CHECK(values(part) == Values{14000, 15000});
  auto exchanged = at::zeros({2000});
  all_to_all_single(exchanged, at::arange(2000, at::kFloat), {}, {}, group);
  CHECK(at::equal(exchanged, (at::arange(2, at::kFloat) + 14).repeat({1000})));
  auto sent = at::full({1}, 4.0);
  broadcast(sent, 0, group);
  reduce(sent, 0, ReduceOp::SUM, group);
  CHECK(values(sent) == Values{4});
  reduce(sent, 7, ReduceOp::SUM, group);
  CHECK(values(sent) == Values{4000});
  barrier(group);
  monitored_barrier(std::chrono::seconds(1), group);
  CHECK(sum(2.0, group) == 2000);
  CHECK(all_gather_strings("x", group) == std::vector<std::string>(1000, "x"));
}

TEST_CASE("a pretended rank has groups along every axis", "[comm][pretend][once]") {
  const Pretended alone("133");
  const auto group = group_of(133, 1024);
  const auto mesh = init_device_mesh({8, 8, 16}, {"pp", "dp", "tp"}, group);
  CHECK(mesh.coordinate() == std::vector<int>{1, 0, 5});
  CHECK(mesh.size("tp") == 16);
  CHECK(mesh.flatten({"dp", "tp"})->getSize() == 128);
  CHECK(mesh.flatten({"dp", "tp"})->getRank() == 5);
  CHECK_FALSE(new_group({0, 1}, group));
  const auto some = new_group({133, 1, 500}, group);
  REQUIRE(some);
  CHECK(some->getRank() == 1);
  auto tensor = at::ones({1});
  all_reduce(tensor, ReduceOp::SUM, mesh.group("dp"));
  all_reduce(tensor, ReduceOp::SUM, some);
  CHECK(values(tensor) == Values{24});
}

TEST_CASE(
    "messages of a pretended rank to ranks that do not exist are dropped",
    "[comm][pretend][errors][once]") {
  const Pretended alone("1");
  const auto group = group_of(1, 8);
  auto tensor = at::ones({1});
  send(tensor, 2, 0, group);
  auto kept = at::zeros({1});
  {
    const EqualMessages equal(kept, at::full({1}, 3.0));
    recv(kept, 2, 0, group);
  }
  CHECK(values(kept) == Values{3});
  CHECK_THAT(
      error_of([&] { split_group(0, 0, group); }),
      Contains("split_group: expected ranks that are processes") && Contains("new_group(ranks)"));
  CHECK_THAT(
      error_of([&] { recv(tensor, 2, 0, group); }),
      Contains("recv: expected a sender that is a process, got rank 2 of a pretended job of 8") &&
          Contains("ddprun --pretend 8 --ranks 0-7. A pipeline"));
}
