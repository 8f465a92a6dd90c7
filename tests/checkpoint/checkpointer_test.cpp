// The contents of a checkpoint, and its files.
#include "checkpoint/checkpointing.h"

#include <unistd.h>

#include <array>
#include <climits>
#include <limits>
#include <optional>
#include <set>

#include <ddp/internal/random_state.h>
#include "checkpoint/python/torch_file.h"

#include "support/regroup.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

struct Course {
  std::vector<std::vector<size_t>> indices;
  std::vector<at::Tensor> values;
};

Course course_of(TrainingRun& run, int steps) {
  Course course;
  for (int i = 0; i < steps; ++i) course.indices.push_back(run.step());
  course.values = run.values();
  return course;
}

std::set<std::string> sorted_names(const std::string& folder) {
  const auto names = names_in(folder);
  return {names.begin(), names.end()};
}

}  // namespace

TEST_CASE("a resumed run continues bit for bit", "[checkpoint][ranks]") {
  const int size = GENERATE(1, 2);
  const bool background = GENERATE(true, false);
  const int before = GENERATE(3, 25);  // in the first epoch, and in a later one
  CAPTURE(size, background, before);
  const TemporaryFolder folder;

  const auto whole = run_ranks<Course>(size, [&](const Rank& self) {
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).background(background));
    run.add_to(checkpointer);
    course_of(run, before);
    checkpointer.save(before);
    return course_of(run, 7);  // while the checkpoint is written
  });
  const auto resumed = run_ranks<Course>(size, [&](const Rank& self) {
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    run.add_to(checkpointer);
    course_of(run, 1);  // changes the state that the load has to replace
    TORCH_CHECK(checkpointer.load_latest() == before);
    return course_of(run, 7);
  });
  for (int rank = 0; rank < size; ++rank) {
    CAPTURE(rank);
    CHECK(resumed[rank].indices == whole[rank].indices);
    CHECK(all_equal(resumed[rank].values, whole[rank].values));
  }
}

TEST_CASE(
    "a checkpoint is a folder with a manifest, and the last ones are kept", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2, 3, 4, 5});
  CHECK(
      sorted_names(folder.path()) ==
      std::set<std::string>{"step-00000003", "step-00000004", "step-00000005"});
  const auto path = folder.file("step-00000005");
  CHECK(
      sorted_names(path) == std::set<std::string>{
                                "manifest.json", "model.pt", "optimizer.pt", "scheduler.pt",
                                "plateau.pt", "sampler.pt", "counter.pt", "rank-0.pt",
                                "rank-1.pt"});
  const auto manifest = read_bytes(path + "/manifest.json");
  for (const auto* part :
       {"\"step\": 5,", "\"world_size\": 2,", "\"libtorch\": \"2.", "\"ddp\": \"" DDP_VERSION,
        "{\"name\": \"rank-1.pt\", \"bytes\": "}) {
    CHECK_THAT(manifest, ContainsText(part));
  }
}

TEST_CASE("steps are listed, and any of them can be loaded", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2, 10});
  const auto loaded = run_ranks<std::string>(2, [&](const Rank& self) {
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    run.add_to(checkpointer);
    TORCH_CHECK(checkpointer.steps() == std::vector<int64_t>({1, 2, 10}));
    checkpointer.load(2);
    TORCH_CHECK(run.counter.count == 2 && run.samples == 2);
    return error_of([&] { checkpointer.load(3); });
  });
  CHECK_THAT(
      loaded, Each(
                  ContainsText("expected a checkpoint of step 3 in " + folder.path()) &&
                  ContainsText("got 1, 2, 10")));
}

TEST_CASE("an empty or missing folder has nothing to load", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  const bool exists = GENERATE(true, false);
  const auto path = exists ? folder.path() : folder.file("none/yet");
  const auto loaded = run_ranks<int>(2, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(path, options_of(self));
    return checkpointer.load_latest() ? 1 : 0;
  });
  CHECK(loaded == std::vector<int>{0, 0});
}

TEST_CASE("a folder's name may have any characters", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("two\nlines, 3: \"of\" 100%");
  save_checkpoints(path, 2, {1, 2});
  const auto loaded = run_ranks<int64_t>(2, [&](const Rank& self) {
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(path, options_of(self));
    run.add_to(checkpointer);
    return checkpointer.load_latest().value_or(-1);
  });
  CHECK(loaded == std::vector<int64_t>{2, 2});
}

TEST_CASE("a relative folder stays where it was named", "[checkpoint][ranks]") {
  const TemporaryFolder folder, elsewhere;
  std::array<char, PATH_MAX> before{};
  REQUIRE(getcwd(before.data(), before.size()) != nullptr);
  const auto go_to = [](const std::string& path) {
    TORCH_CHECK(chdir(path.c_str()) == 0, "cannot go to ", path);
  };
  const auto loaded = run_ranks<int64_t>(1, [&](const Rank& self) {
    go_to(folder.path());
    TrainingRun run(self);
    ddp::Checkpointer checkpointer("run/one", options_of(self));
    run.add_to(checkpointer);
    checkpointer.save(1);
    go_to(elsewhere.path());
    checkpointer.save(2);
    checkpointer.wait();
    return checkpointer.load_latest().value_or(-1);
  });
  go_to(before.data());
  CHECK(loaded == std::vector<int64_t>{2});
  CHECK(names_in(folder.file("run/one")).size() == 2);
  CHECK(names_in(elsewhere.path()).empty());
}

TEST_CASE("step numbers may be as large as int64 allows", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  constexpr int64_t kQuintillion = 1'000'000'000'000'000'000;
  const std::vector<int64_t> steps{
      99'999'999, 100'000'000, kQuintillion - 1, kQuintillion, std::numeric_limits<int64_t>::max()};
  const auto loaded = run_ranks<int64_t>(1, [&](const Rank& self) {
    int64_t value = 0;
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).keep_last(0));
    checkpointer.add("value", value);
    for (const auto step : steps) {
      value = step - 1;
      checkpointer.save(step);
    }
    checkpointer.wait();
    TORCH_CHECK(checkpointer.steps() == steps);
    TORCH_CHECK(checkpointer.load_latest() == steps.back());
    TORCH_CHECK(value == steps.back() - 1);
    checkpointer.load(kQuintillion);
    return value;
  });
  CHECK(loaded == std::vector<int64_t>{kQuintillion - 1});
}

TEST_CASE("a save of the same step replaces the previous one", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto counts = run_ranks<int64_t>(2, [&](const Rank& self) {
    Counter counter;
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("counter", counter);
    for (counter.count = 1; counter.count < 4; ++counter.count) checkpointer.save(1);
    counter.count = 0;
    checkpointer.load(1);
    return counter.count;
  });
  CHECK(counts == std::vector<int64_t>{3, 3});
  CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
}

TEST_CASE("maybe_save saves by steps and by rank 0's clock", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  const auto saved = run_ranks<std::vector<int64_t>>(2, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).every_steps(3).keep_last(0));
    std::vector<int64_t> steps;
    for (int64_t step = 0; step < 8; ++step) {
      if (checkpointer.maybe_save(step)) steps.push_back(step);
      TORCH_CHECK(!checkpointer.maybe_save(step));
    }
    // Rank 1's clock would make it save at once: only rank 0's counts.
    const auto every = std::chrono::seconds(self.rank == 0 ? 1 : 100);
    ddp::Checkpointer by_time(folder.path(), options_of(self).every(every).keep_last(0));
    int64_t step = 100;
    while (!by_time.maybe_save(step)) ++step;
    steps.push_back(step > 100 ? 1 : 0);
    return steps;
  });
  CHECK(saved[0] == std::vector<int64_t>{3, 6, 1});
  CHECK(saved[1] == saved[0]);
}

TEST_CASE("plain values, tensors and other optimizers are restored", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    auto weight = torch::ones({3});
    weight.set_requires_grad(true);
    torch::optim::LBFGS lbfgs({weight}, /*defaults=*/0.5);
    at::Tensor average = torch::arange(4.0).view({2, 2}).t();
    int small = 3;
    double rate = 0.1;
    float half = 0.5F;
    bool flag = true;
    std::string text = "a \"b\"\n";
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("lbfgs", lbfgs).add("average", average).add("small", small);
    checkpointer.add("rate", rate).add("half", half).add("flag", flag).add("text", text);
    checkpointer.save(0);
    const auto expected = average.clone();
    average.zero_();
    small = 0, rate = 0, half = 0, flag = false, text = "";
    lbfgs.param_groups().front().options().set_lr(2);
    checkpointer.load(0);
    TORCH_CHECK(torch::equal(average, expected));
    TORCH_CHECK(small == 3 && rate == 0.1 && half == 0.5F && flag && text == "a \"b\"\n");
    TORCH_CHECK(lbfgs.param_groups().front().options().get_lr() == 0.5);
    return 0;
  });
}

TEST_CASE("a checkpoint of 4 ranks loads on fewer, and back on 4", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  std::multiset<size_t> seen;
  std::vector<at::Tensor> expected;
  int64_t step = 0;
  const auto resume = [&](int size, int steps) {
    const auto courses = run_ranks<Course>(size, [&](const Rank& self) {
      TrainingRun run(self);
      ddp::Checkpointer checkpointer(folder.path(), options_of(self));
      run.add_to(checkpointer);
      const auto loaded = checkpointer.load_latest();
      TORCH_CHECK(loaded.value_or(0) == step);
      const auto at_load = run.values();
      // The last value holds this rank's own count, which new ranks do not have.
      const std::vector<at::Tensor> shared(at_load.begin(), at_load.end() - 1);
      TORCH_CHECK(expected.empty() || all_equal(shared, expected));
      auto course = course_of(run, steps);
      checkpointer.save(step + steps);
      return course;
    });
    for (const auto& course : courses) {
      for (const auto& indices : course.indices) seen.insert(indices.begin(), indices.end());
    }
    step += steps;
    expected = courses.front().values;
    expected.pop_back();
  };
  resume(4, 2);  // 16 samples
  resume(2, 3);  // 12
  resume(1, 2);  // 4
  resume(4, 1);  // the last 8 of 40
  std::multiset<size_t> all;
  for (size_t i = 0; i < TrainingRun::kSamples; ++i) all.insert(i);
  CHECK(seen == all);
}

TEST_CASE("saved random numbers continue, and a new rank draws its own", "[checkpoint][pure]") {
  torch::manual_seed(3);
  torch::rand({5});
  const auto saved = ddp::copy_to_host(ddp::random_state());
  const auto drawn = torch::rand({5});
  ddp::prepare_random_state(saved, "saved").apply();
  CHECK(torch::equal(torch::rand({5}), drawn));
  const auto draw_on_new = [&](int rank, int64_t step) {
    ddp::prepare_new_random_state(saved, rank, step, "saved").apply();
    return torch::rand({5});
  };
  CHECK(torch::equal(draw_on_new(2, 10), draw_on_new(2, 10)));
  CHECK(!torch::equal(draw_on_new(2, 10), draw_on_new(3, 10)));
  CHECK(!torch::equal(draw_on_new(2, 10), draw_on_new(2, 11)));
  CHECK_THROWS_WITH(
      ddp::prepare_random_state(ddp::make_dict(), "saved"),
      ContainsText("saved: expected the state of a generator"));
}

TEST_CASE("a rank loads its own parts, and a new rank keeps its own", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    int64_t own = 10 + self.rank;
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add_per_rank("own", own).save(1);
    return 0;
  });
  const auto loaded = run_ranks<int64_t>(3, [&](const Rank& self) {
    int64_t own = 20 + self.rank;
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add_per_rank("own", own).load(1);
    return own;
  });
  CHECK(loaded == std::vector<int64_t>{10, 11, 22});
}

TEST_CASE("a checkpointer goes on with other ranks", "[checkpoint][ranks]") {
  const bool is_replaced = GENERATE(true, false);
  CAPTURE(is_replaced);
  const TemporaryFolder folder;
  const int size = is_replaced ? 3 : 2;
  struct Seen {
    bool again = false, next = false;
    std::vector<at::Tensor> saved, loaded;
    std::vector<int64_t> steps;
  };
  const auto seen = run_ranks<Seen>(3, [&](const Rank& self) {
    Seen seen;
    std::optional<TrainingRun> run(self);
    std::optional<ddp::Checkpointer> checkpointer;
    const auto begin = [&](const ddp::ProcessGroup& group) {
      checkpointer.emplace(
          folder.path(), ddp::CheckpointerOptions().every_steps(2).process_group(group));
      run->add_to(*checkpointer);
    };
    begin(self.group);
    course_of(*run, 4);
    checkpointer->save(4);
    if (self.rank == 2) {  // is lost while that is written
      checkpointer.reset();
      if (!is_replaced) return seen;
      begin(regroup(self, "alone", 0, 1));
    }
    const auto group = regroup(self, "mended", self.rank, size);
    checkpointer->rebind(group);
    seen.again = checkpointer->maybe_save(4);
    seen.next = checkpointer->maybe_save(6);
    seen.saved = run->values();
    checkpointer->load(6);
    seen.loaded = run->values();
    seen.steps = checkpointer->steps();
    return seen;
  });
  for (int rank = 0; rank < size; ++rank) {
    CAPTURE(rank);
    CHECK(seen[rank].again == seen[0].again);
    CHECK(seen[rank].next);
    CHECK(all_equal(seen[rank].saved, seen[rank].loaded));
    CHECK(seen[rank].steps == std::vector<int64_t>{4, 6});
  }
}
