// What Elastic takes and refuses, and its parts: mirrors, states as texts, who keeps copies.
#include <ddp/elastic.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/membership/generations.h>
#include <ddp/muon.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/error_of.h"
#include "support/pretended_capture.h"
#include "support/ranks.h"
#include "training/elastic/flat_state.h"
#include "training/elastic/snapshots.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

}  // namespace

TEST_CASE("a copy of a part is on the next host", "[elastic]") {
  using Hosts = std::vector<std::string>;
  const auto keepers = [](const Hosts& hosts) { return elastic::keepers_of(hosts); };
  CHECK(keepers({"a"}) == std::vector<int>{0});
  CHECK(keepers({"a", "a", "a"}) == std::vector<int>{1, 2, 0});
  CHECK(keepers({"a", "a", "b", "b"}) == std::vector<int>{2, 3, 0, 1});
  CHECK(keepers({"a", "b", "a", "c"}) == std::vector<int>{1, 3, 1, 0});
}

TEST_CASE("what Elastic refuses", "[ranks][elastic][errors]") {
  const auto coordinator = [](int ranks) {
    return std::make_shared<TestCoordinator>(ranks, ranks);
  };
  const auto options = [](const TestCoordinator& one) {
    return options_of_thread(
        one.address(), ProcessGroupOptions().timeout(std::chrono::seconds(20)));
  };
  SECTION("parts and calls") {
    const auto one = coordinator(1);
    Elastic run(options(*one));
    int64_t number = 0;
    run.add("number", number);
    CHECK_THAT(
        error_of([&] { run.add("number", number); }),
        ContainsText("expected a new name, got \"number\" again"));
    torch::nn::Linear net(4, 2);
    torch::optim::LBFGS lbfgs(net->parameters());
    CHECK_THAT(error_of([&] { run.add("lbfgs", lbfgs); }), ContainsText("got LBFGS. Use another"));
    DistributedDataParallel model(
        net, DistributedDataParallelOptions().process_group(run.process_group()));
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(
        model, torch::optim::AdamOptions(), ZeroOptions().stage(2).overlap(true));
    CHECK_THAT(
        error_of([&] { run.add("zero", zero); }),
        ContainsText("expected a ZeroRedundancyOptimizer without overlap, got overlap"));
    const auto matrices = optim::split_for_muon(*model).matrices;
    optim::Muon keeps_group(*model, {matrices}), whole(matrices), of_plain(*net, {matrices});
    CHECK_THAT(
        error_of([&] { run.add("muon", keeps_group); }),
        ContainsText(
            "Elastic::add(\"muon\"): expected an optimizer that keeps no process group, got "
            "a Muon made from a model"));
    CHECK_THAT(
        error_of([&] { run.add("muon", keeps_group); }),
        ContainsText("ddp::optim::Muon(ddp::optim::split_for_muon(*model).matrices)"));
    run.add("whole muon", whole).add("muon of a plain module", of_plain);
    CHECK_THAT(
        error_of([] { Elastic other(ElasticOptions().snapshot_every(0)); }),
        ContainsText("snapshot_every(): expected 1 or more, got 0"));
    CHECK_THAT(error_of([&] { run.step([] {}); }), ContainsText("got a call outside of a turn"));
    CHECK_THAT(
        error_of([&] {
          run.loop([&] {
            run.step([&] { ++number; });
            run.step([&] { ++number; });
            return true;
          });
        }),
        ContainsText("expected one step in a turn, got a second one"));
    CHECK(number == 1);
  }
  SECTION("other parts on another rank, and parts that differ") {
    const bool names = GENERATE(true, false);
    const auto two = coordinator(2);
    const auto errors = errors_of_ranks(2, [&](const Rank& self) {
      Elastic run(options(*two));
      int64_t number = names ? 0 : self.rank;
      run.add(names && self.rank == 1 ? "another" : "number", number);
      run.loop([] { return false; });
    });
    CHECK_THAT(
        errors,
        Each(ContainsText(
            names ? "expected the same parts on every rank, got \""
                  : "expected every part to be equal on all ranks, but \"number\" differs")));
  }
  SECTION("addresses and backends") {
    CHECK_THAT(
        error_of([] { Elastic run(ElasticOptions().coordinator("host")); }),
        ContainsText("ElasticOptions::coordinator(): expected HOST:PORT/TOKEN, got 'host'"));
    CHECK_THAT(
        error_of(
            [] { Elastic run(ElasticOptions().group(ProcessGroupOptions().backend("nccl"))); }),
        ContainsText("expected a backend for CPU tensors too, got \"nccl\""));
    CHECK_THAT(
        error_of([] {
          Elastic run(ElasticOptions().sets_default_group(false).group(
              ProcessGroupOptions().backend("cpu:gloo,cuda:nccl")));
        }),
        ContainsText("sets_default_group(): expected true with backend \"cpu:gloo,cuda:nccl\""));
    CHECK_THAT(
        error_of([&] {
          const auto one = coordinator(1);
          Elastic run(options(*one));
          torch::nn::Module net;
          net.register_parameter("p", torch::empty({2}, at::kMeta));
          run.add("net", net);
        }),
        ContainsText("expected parameters with values, got some on the meta device"));
  }
}

TEST_CASE("a mirror answers as the process itself would", "[elastic]") {
  const auto group = make_mirror_group(2, 4, std::chrono::seconds(1));
  const auto value = [] { return torch::full({2}, 3.0); };
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::SUM, group), torch::full({2}, 12.0)));
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::AVG, group), value()));
  CHECK(torch::equal(all_reduce(value(), c10d::ReduceOp::MAX, group), value()));
  auto tensor = value();
  broadcast(tensor, 0, group);
  CHECK(torch::equal(tensor, value()));
  std::vector<at::Tensor> all(4);
  for (auto& one : all) one = torch::zeros({2});
  all_gather(all, value(), group);
  for (const auto& one : all) CHECK(torch::equal(one, value()));
  CHECK(all_gather_strings("text", group) == std::vector<std::string>(4, "text"));
  CHECK_THAT(
      error_of([&] { send(tensor, 1, 0, group); }),
      ContainsText("send: expected a group of ranks that train"));
  CHECK_THAT(
      error_of([&] {
        new_group({0, 1}, group);
      }),
      ContainsText("new_group: expected the group of ranks that train"));
  end_mirror_group(group);
  CHECK_THAT(
      error_of([&] { all_reduce(tensor, c10d::ReduceOp::SUM, group); }),
      ContainsText("This group ended. Ask ddp::default_group() each time"));
  CHECK_THROWS_AS(all_reduce(tensor, c10d::ReduceOp::SUM, group), RankLost);
}

TEST_CASE("no graph captures a collective of an elastic job", "[elastic][errors]") {
  const auto group = make_mirror_group(0, 2, std::chrono::seconds(1));
  auto tensor = torch::ones({2});
  pretends_to_capture = true;
  const auto error = error_of([&] { all_reduce(tensor, c10d::ReduceOp::SUM, group); });
  pretends_to_capture = false;
  CHECK_THAT(error, ContainsText("expected no capture into a graph in an elastic job"));
  CHECK_THAT(error, ContainsText("Train without CapturedStep"));
}

TEST_CASE("a state as a text and tensors, and back", "[elastic]") {
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(torch::arange(6).view({2, 3}));
  list.push_back(std::string("two\nlines"));
  list.push_back(c10::IValue());
  dict.insert(c10::IValue("list"), list);
  dict.insert(c10::IValue(int64_t{7}), c10::ivalue::Tuple::create({0.1, true, false}));
  dict.insert(c10::IValue("empty"), torch::zeros({0, 3}, torch::kBFloat16));
  dict.insert(c10::IValue("undefined"), at::Tensor());
  dict.insert(c10::IValue("the list again"), list);  // as another list: a copy has two
  const auto text = elastic::packed_state(dict);
  const auto copy = elastic::unpacked_state(text);
  CHECK(elastic::packed_state(copy) == text);
  CHECK(elastic::hash_of(copy) == elastic::hash_of(dict));
  CHECK(elastic::hash_of(elastic::copied(dict)) == elastic::hash_of(dict));
  list.get(0).toTensor()[1][2] = 8;
  CHECK(elastic::hash_of(copy) != elastic::hash_of(dict));
}

}  // namespace ddp
