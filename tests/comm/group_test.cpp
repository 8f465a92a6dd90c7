#include <ddp/process_group.h>
#include <ddp/seed_all.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <future>
#include <mutex>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/collectives.h>

#include "comm/backends/gpu_assignment.h"
#include "comm/backends/nccl/nccl.h"
#include "comm/group/group_builder.h"
#include "comm/group/monitored_group.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/recording_backend.h"

#include "support/catch.h"

using c10d::ReduceOp;
using ddp::ProcessGroup;
using ddp::ProcessGroupOptions;
using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {

ProcessGroupOptions world_of_one() {
  return ProcessGroupOptions()
      .backend("gloo")
      .store(c10::make_intrusive<c10d::HashStore>())
      .rank(0)
      .world_size(1)
      .timeout(20s);
}

struct DefaultGroup {
  explicit DefaultGroup(const ProcessGroupOptions& options = world_of_one()) {
    ddp::init_process_group(options);
  }
  ~DefaultGroup() { ddp::destroy_process_group(); }
};

/// Makes the groups of these ranks, each on a thread; returns their errors, "" for none.
std::vector<std::string> errors_of(const std::vector<ProcessGroupOptions>& ranks) {
  std::vector<std::future<std::string>> futures;
  for (const auto& options : ranks) {
    futures.push_back(std::async(std::launch::async, [options] {
      try {
        ddp::make_process_group(options);
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string();
    }));
  }
  std::vector<std::string> errors;
  for (auto& future : futures) errors.push_back(future.get());
  return errors;
}

}  // namespace

TEST_CASE("a forked process does not shut down or abort its parent's group", "[ranks][once]") {
  Events events;
  const auto group = ddp::make_process_group(world_of_one());
  group->setBackend(
      c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
      c10::make_intrusive<RecordingBackend>(0, 1, events));
  const auto child = fork();
  if (child == 0) {
    group->shutdown();
    group->abort();
    _exit(static_cast<int>(events.size()));
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  group->shutdown();
  CHECK(events == Events{"shutdown"});
}

TEST_CASE("a group has its rank and size and works as a c10d group", "[comm][ranks][gloo]") {
  const int size = GENERATE(1, 2, 3);
  const auto results = run_ranks<std::vector<int>>(size, [](const Rank& self) {
    // The call that c10d's own classes, such as its Reducer, make.
    std::vector<at::Tensor> tensors{at::full({2}, self.rank)};
    self.group->allreduce(tensors)->wait();
    return std::vector<int>{
        ddp::get_rank(self.group), ddp::get_world_size(self.group), tensors[0][0].item<int>(),
        self.group->getBackend(c10::kCPU)->getBackendName() == "gloo" ? 1 : 0};
  });
  for (int rank = 0; rank < size; ++rank) {
    CHECK(results[rank] == std::vector<int>{rank, size, size * (size - 1) / 2, 1});
  }
}

TEST_CASE("several groups can be made over one store", "[comm][ranks]") {
  const auto results = run_ranks<at::Tensor>(3, [](const Rank& self) {
    const auto second = ddp::make_process_group(ProcessGroupOptions()
                                                    .backend("cpu:gloo")
                                                    .store(self.store)
                                                    .rank(self.rank)
                                                    .world_size(3)
                                                    .timeout(20s));
    auto tensor = at::full({1}, self.rank + 1);
    ddp::all_reduce(tensor, ReduceOp::SUM, second);
    ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
    return tensor;
  });
  for (const auto& result : results) CHECK(result.item<int>() == 18);
}

TEST_CASE("the default group can be made, destroyed and made again", "[comm][once]") {
  CHECK_FALSE(ddp::is_initialized());
  ddp::destroy_process_group();
  {
    const DefaultGroup scope;
    CHECK(ddp::is_initialized());
    CHECK(ddp::get_rank() == 0);
    CHECK(ddp::get_world_size() == 1);
    auto tensor = at::full({2}, 3);
    ddp::all_reduce(tensor);
    ddp::barrier({});
    CHECK(at::equal(tensor, at::full({2}, 3)));
  }
  CHECK_FALSE(ddp::is_initialized());
  const DefaultGroup again;
  CHECK(ddp::is_initialized());
}

TEST_CASE(
    "using the default group without one is an error that says how to get one",
    "[comm][errors][once]") {
  auto tensor = at::ones({1});
  CHECK_THROWS_WITH(
      ddp::all_reduce(tensor),
      ContainsText("expected a default group, got none. Call ddp::init_process_group()"));
  CHECK_THROWS_WITH(ddp::get_rank(), ContainsText("expected a default group"));
  CHECK_THROWS_WITH(ddp::default_group(), ContainsText("expected a default group"));
  CHECK_THROWS_WITH(ddp::new_group({0}), ContainsText("expected a default group"));
}

TEST_CASE("a second init is an error", "[comm][errors][once]") {
  const DefaultGroup scope;
  CHECK_THROWS_WITH(
      ddp::init_process_group(world_of_one()),
      ContainsText("expected no default group, but there is one") &&
          ContainsText("destroy_process_group()"));
}

TEST_CASE("an empty group is an error and not the default group", "[comm][errors][once]") {
  const DefaultGroup scope;
  auto tensor = at::ones({1});
  const ProcessGroup not_mine;
  CHECK_THROWS_WITH(
      ddp::all_reduce(tensor, ReduceOp::SUM, not_mine),
      ContainsText("expected a group this process is a member of, got an empty one"));
  CHECK_THROWS_WITH(ddp::get_rank(not_mine), ContainsText("got an empty one"));
  CHECK_THROWS_WITH(ddp::get_rank(nullptr), ContainsText("got an empty one"));
  CHECK_THROWS_WITH(ddp::all_gather_strings("text", not_mine), ContainsText("got an empty one"));
  CHECK(ddp::all_gather_strings("text") == std::vector<std::string>{"text"});
}

TEST_CASE("a group argument accepts everything that converts to a ProcessGroup", "[comm][once]") {
  struct Derived : c10d::ProcessGroup {
    using c10d::ProcessGroup::ProcessGroup;
  };
  const auto derived = c10::make_intrusive<Derived>(/*rank=*/2, /*size=*/3);
  CHECK(ddp::get_rank(derived) == 2);
  CHECK(ddp::get_world_size(c10::make_intrusive<Derived>(2, 3)) == 3);
  ProcessGroup lvalue = derived;
  CHECK(ddp::get_rank(lvalue) == 2);
  CHECK(ddp::get_rank({derived}) == 2);
  CHECK(lvalue.defined());
  static_assert(!std::is_convertible_v<int, ddp::GroupArg>);
  static_assert(!std::is_convertible_v<std::string, ddp::GroupArg>);
}

TEST_CASE("a subgroup has its own ranks and its own members", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<int>>(3, [](const Rank& self) {
    // The same ranks twice, in different orders: the groups must not share keys.
    const auto pair = ddp::new_group({2, 1}, self.group);
    const auto same = ddp::new_group({1, 2}, self.group);
    const auto own = ddp::new_group({0}, self.group);
    std::vector<int> seen{pair ? ddp::get_rank(pair) : -1, same ? 1 : 0, own ? 1 : 0};
    if (pair) {
      auto first = at::full({1}, self.rank);
      auto second = at::full({1}, 10 * self.rank);
      const auto work = ddp::all_reduce_async(first, ReduceOp::SUM, pair);
      ddp::all_reduce(second, ReduceOp::SUM, same);
      work->wait();
      pair->getStore()->add("probe", 1);
      TORCH_CHECK(!same->getStore()->check({"probe"}), "two groups share their keys");
      seen.push_back(first.item<int>());
      seen.push_back(second.item<int>());
    }
    return seen;
  });
  CHECK(results[0] == std::vector<int>{-1, 0, 1});
  CHECK(results[1] == std::vector<int>{0, 1, 0, 3, 30});
  CHECK(results[2] == std::vector<int>{1, 1, 0, 3, 30});
}

TEST_CASE("a group is split by color, in the order of keys", "[comm][ranks]") {
  const auto results = run_ranks<std::vector<int>>(5, [](const Rank& self) {
    // Ranks 0, 2 and 1, 3; rank 4 in none. Larger ranks come first.
    const int color = self.rank == 4 ? -1 : self.rank % 2;
    const auto group = ddp::split_group(color, -self.rank, self.group);
    // By equal keys, of the same colors: groups of their own.
    const auto again = ddp::split_group(color, 7, self.group);
    if (!group) return std::vector<int>{again ? 1 : 0};
    auto sum = at::full({1}, self.rank);
    ddp::all_reduce(sum, ReduceOp::SUM, group);
    auto product = at::full({1}, self.rank + 1);
    ddp::all_reduce(product, ReduceOp::PRODUCT, again);
    // A group of a group.
    const auto own = ddp::split_group(ddp::get_rank(group), 0, group);
    return std::vector<int>{ddp::get_rank(group), ddp::get_world_size(group),
                            sum.item<int>(),      ddp::get_rank(again),
                            product.item<int>(),  ddp::get_world_size(own)};
  });
  CHECK(results[0] == std::vector<int>{1, 2, 2, 0, 3, 1});
  CHECK(results[1] == std::vector<int>{1, 2, 4, 0, 8, 1});
  CHECK(results[2] == std::vector<int>{0, 2, 2, 1, 3, 1});
  CHECK(results[3] == std::vector<int>{0, 2, 4, 1, 8, 1});
  CHECK(results[4] == std::vector<int>{0});
}

TEST_CASE("a group of a group names the ranks of the world", "[comm][ranks]") {
  const auto names = run_ranks<std::string>(4, [](const Rank& self) {
    const auto upper = ddp::new_group({1, 2, 3}, self.group);
    if (!upper) return std::string();
    const auto last = ddp::new_group({2, 1}, upper);
    return last ? last->getGroupName() : "none";
  });
  CHECK(names == std::vector<std::string>{"", "none", "group [2, 3]", "group [2, 3]"});
}

TEST_CASE("all ranks throw if one cannot split a group", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto error = error_of([&] { ddp::split_group(self.rank == 0 ? -2 : 0, 0, self.group); });
    // The group goes on.
    TORCH_CHECK(ddp::get_world_size(ddp::split_group(0, 0, self.group)) == 2);
    TORCH_CHECK(false, error);
  });
  constexpr auto kText = "expected a color of at least -1, got -2 on rank 0 of 2";
  CHECK_THAT(errors[0], ContainsText("split_group: ") && ContainsText(kText));
  CHECK_THAT(errors[1], ContainsText("split_group on rank 0 of 2: ") && ContainsText(kText));
}

TEST_CASE("a group of another maker cannot be split", "[comm][errors][once]") {
  const auto foreign =
      c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  CHECK_THROWS_WITH(
      ddp::split_group(0, 0, foreign),
      ContainsText("split_group: expected a group that this library made"));
}

TEST_CASE("a rank that does not come to a split fails all", "[comm][ranks][errors]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    if (self.rank == 2) {
      ddp::monitor_of(self.group)->fail("rank 2 cannot go on");
      return self.wait_until_others_end();
    }
    ddp::split_group(0, 0, self.group);
  });
  for (int rank : {0, 1}) CHECK_THAT(errors[rank], ContainsText("rank 2 cannot go on"));
}

TEST_CASE("bad ranks for a new group are errors", "[comm][errors][once]") {
  const DefaultGroup scope;
  CHECK_THROWS_WITH(
      ddp::new_group({}),
      ContainsText("new_group: expected at least one rank, got none on rank 0 of 1. List"));
  CHECK_THROWS_WITH(
      ddp::new_group({0, 1}),
      ContainsText(
          "expected ranks of the parent group, 0 to 0, got 1 in [0, 1] on rank 0 of 1. Leave out"));
  CHECK_THROWS_WITH(ddp::new_group({-1}), ContainsText("got -1 in [-1]"));
  CHECK_THROWS_WITH(
      ddp::new_group({0, 0}),
      ContainsText("expected each rank once, got 0 twice in [0, 0] on rank 0 of 1. List it once"));
}

TEST_CASE("all ranks throw if they request different new groups", "[comm][ranks][errors]") {
  const auto errors =
      errors_of_ranks(2, [](const Rank& self) { ddp::new_group({self.rank}, self.group); });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0], ContainsText("new_group: expected all ranks to call it alike") &&
                     ContainsText("[0]") && ContainsText("[1]"));
}

TEST_CASE("a timeout may be the longest that there is", "[comm][ranks]") {
  constexpr auto kLongest = std::chrono::milliseconds::max();
  const auto sums = run_ranks<double>(2, [&](const Rank& self) {
    const auto group = ddp::make_process_group(
        ProcessGroupOptions()
            .backend(self.group->getBackend(at::kCPU)->getBackendName())
            .store(c10::make_intrusive<c10d::PrefixStore>("longest", self.store))
            .rank(self.rank)
            .world_size(2)
            .timeout(kLongest));
    const auto part = ddp::new_group({0, 1}, kLongest, group);
    auto tensor = at::ones({1});
    // Long enough that the other rank looks for the cause.
    if (self.rank == 1) std::this_thread::sleep_for(1500ms);
    ddp::all_reduce(tensor, group);
    ddp::all_reduce(tensor, part);
    return tensor.item<double>();
  });
  CHECK(sums == std::vector<double>(2, 4));
}

TEST_CASE(
    "every rank that arrived names the missing ranks of a world", "[comm][ranks][errors][once]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank = [&](int number) {
    return ProcessGroupOptions().backend("gloo").store(store).rank(number).world_size(4).timeout(
        4s);
  };
  const auto start = std::chrono::steady_clock::now();
  const auto errors = errors_of({rank(1), rank(3)});
  CHECK(std::chrono::steady_clock::now() - start < 7500ms);  // not two timeouts
  CHECK_THAT(
      errors,
      Each(ContainsText(
          "init_process_group: expected all 4 ranks within 4000 ms, but ranks 0, 2 did not come")));
}

TEST_CASE("all ranks throw if they disagree about the world", "[comm][ranks][errors][once]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank = [&](int number, int size, const char* backend) {
    return ProcessGroupOptions()
        .backend(backend)
        .store(store)
        .rank(number)
        .world_size(size)
        .timeout(20s);
  };
  auto errors = errors_of({rank(0, 2, "gloo"), rank(1, 3, "gloo")});
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0], ContainsText("world size 2") && ContainsText("world size 3"));

  errors = errors_of({rank(0, 2, "gloo"), rank(1, 2, "cpu:gloo")});
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0], ContainsText("cpu:gloo,cuda:gloo") && ContainsText("backend cpu:gloo"));
}

TEST_CASE(
    "a tensor on a device without a backend is an error that lists those with one",
    "[comm][errors][once]") {
  const auto group = ddp::make_process_group(world_of_one().backend("cpu:gloo"));
  auto tensor = at::ones({1}, at::kMeta);
  CHECK_THROWS_WITH(
      ddp::all_reduce(tensor, ReduceOp::SUM, group),
      ContainsText(
          "expected a tensor on a device the group has a backend for (cpu), got one on meta"));
}

TEST_CASE("the local rank is the launcher's, or 0 in a world of one", "[comm][errors][once]") {
  ddp::Environment environment;
  CHECK(ddp::local_rank_of(environment, 1) == 0);
  CHECK_THROWS_WITH(
      ddp::local_rank_of(environment, 2),
      ContainsText("expected LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or SLURM_LOCALID in the "
                   "environment, got none of them in a world of 2 ranks"));
  CHECK(ddp::local_rank_of(environment, 2, 1) == 1);
  environment.local_rank = ddp::Setting{"SLURM_LOCALID", "3"};
  CHECK(ddp::local_rank_of(environment, 8, 1) == 3);
  CHECK(ddp::local_rank_of(environment, 8) == 3);
  environment.local_rank = ddp::Setting{"LOCAL_RANK", "x"};
  CHECK_THROWS_WITH(
      ddp::local_rank_of(environment, 8),
      ContainsText(
          "LOCAL_RANK: expected a whole number of at least 0, got \"x\". Correct it, or start"));
}

TEST_CASE(
    "ranks without a launcher's local rank count those of their host", "[comm][ranks][once]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::optional<int>>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    const auto options =
        ProcessGroupOptions().backend("gloo").store(store).rank(rank).world_size(3).timeout(20s);
    ranks.push_back(std::async(std::launch::async, [options] {
      const auto group = ddp::make_process_group(options);
      return dynamic_cast<const ddp::MonitoredGroup&>(*group).recipe().local_rank;
    }));
  }
  for (int rank = 0; rank < 3; ++rank) CHECK(ranks[rank].get() == rank);
}

TEST_CASE(
    "NCCL without a GPU, and MPI, are errors that name the alternatives", "[comm][errors][once]") {
  CHECK_THROWS_WITH(
      ddp::make_process_group(world_of_one().backend("mpi")),
      ContainsText("backend mpi: expected a program that is linked with ddp::mpi"));
  const auto missing = ddp::backends::why_no_nccl();
  const auto why =
      missing.empty() ? ddp::choose_gpu({}, ddp::visible_devices(c10::kCUDA)).why_not : missing;
  if (why.empty()) return;
  CHECK_THROWS_WITH(
      ddp::make_process_group(world_of_one().backend("nccl")),
      ContainsText("backend nccl: " + why));
}

TEST_CASE("the default backend carries CPU tensors with GPUs and without", "[comm][ranks][once]") {
  RanksOptions options;
  options.backend = "";
  const auto results = run_ranks<int>(2, options, [](const Rank& self) {
    auto tensor = at::full({1}, self.rank + 1);
    ddp::all_reduce(tensor, ReduceOp::SUM, self.group);
    return tensor.item<int>();
  });
  CHECK(results == std::vector<int>{3, 3});
}

TEST_CASE("a problem of one rank is thrown on all ranks", "[comm][ranks][errors][once]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<ProcessGroupOptions> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(
        ProcessGroupOptions().backend("cpu:mpi").store(store).rank(rank).world_size(2).timeout(
            20s));
  }
  const auto errors = errors_of(ranks);
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0], ContainsText("init_process_group on rank ") &&
                     ContainsText(" of 2: backend mpi: expected a program that is linked"));
}

TEST_CASE("a weak reference to a group keeps no backend of it", "[comm][once]") {
  auto group = ddp::make_process_group(world_of_one());
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> weak(group);
  const c10::weak_intrusive_ptr<c10d::Backend> backend(group->getBackend(at::kCPU));
  at::Tensor sum = at::ones(1);
  ddp::all_reduce(sum, ReduceOp::SUM, group);
  CHECK_FALSE(backend.expired());
  group.reset();
  CHECK(weak.expired());
  CHECK(backend.expired());
}

TEST_CASE("a broken pipe ends the programs that a rank starts, and not the rank", "[comm][once]") {
  ::signal(SIGPIPE, SIG_DFL);
  ddp::make_process_group(world_of_one());
  ::raise(SIGPIPE);
  const int status = ::system("exec sh -c 'kill -PIPE $$'");
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE));
}

TEST_CASE("a group keeps the program's own handler of broken pipes", "[comm][once]") {
  ::signal(SIGPIPE, SIG_IGN);
  ddp::make_process_group(world_of_one());
  CHECK((::signal(SIGPIPE, SIG_DFL) == SIG_IGN));
}

// The default generators belong to the process, so the ranks of a test take turns.
TEST_CASE(
    "seed_all gives each rank numbers of its own, and again the same", "[comm][ranks][once]") {
  const auto draw = [] { return at::rand({8}, at::kDouble); };
  std::mutex mutex;
  const auto drawn = run_ranks<std::vector<at::Tensor>>(3, [&](const Rank& self) {
    const std::lock_guard lock(mutex);
    std::vector<at::Tensor> draws;
    for (const uint64_t seed : {5, 5, 6}) {
      ddp::seed_all(seed, self.group);
      draws.push_back(draw());
    }
    return draws;
  });
  std::vector<at::Tensor> different;
  for (const auto& draws : drawn) {
    CHECK(at::equal(draws[0], draws[1]));
    different.push_back(draws[0]);
    different.push_back(draws[2]);
  }
  // Neighbours do not repeat each other: rank 1 with seed 5, and rank 0 with seed 6.
  for (size_t i = 0; i < different.size(); ++i) {
    for (size_t j = 0; j < i; ++j) CHECK_FALSE(at::equal(different[i], different[j]));
  }
  CHECK_THROWS_WITH(ddp::seed_all(5), ContainsText("expected a default group"));
}
