// Checkpoints that cannot be loaded, and folders that cannot be written to: every rank gets an
// error that names file and cause, and no state changes.
#include "checkpoint/checkpointing.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include <ddp/internal/crc32c.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/small_disk.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

/// The result of load_latest or load on a rank.
struct Outcome {
  int64_t step = -1;  // the loaded step; -1: none
  std::string error;
  std::vector<std::string> warnings;
  bool unchanged = false;
};

// Loads on ranks whose program `change` may make differ from the one that saved.
std::vector<Outcome> load_on(
    int size, const std::function<std::string(const Rank&)>& folder_of,
    const ddp::CheckpointerOptions& options = {},
    const std::function<void(TrainingRun&, ddp::Checkpointer&)>& add = {}) {
  return run_ranks<Outcome>(size, [&](const Rank& self) {
    const Warnings warnings;
    Outcome outcome;
    TrainingRun run(self);
    run.step();
    const auto before = run.values();
    auto own = options;
    ddp::Checkpointer checkpointer(folder_of(self), own.process_group(self.group));
    if (add) {
      add(run, checkpointer);
    } else {
      run.add_to(checkpointer);
    }
    outcome.error = error_of([&] { outcome.step = checkpointer.load_latest().value_or(-1); });
    outcome.unchanged = all_equal(run.values(), before);
    outcome.warnings = warnings.texts;
    ddp::barrier(self.group);  // the group stays usable after any error
    return outcome;
  });
}

std::vector<Outcome> load_in(
    const std::string& folder, const ddp::CheckpointerOptions& options = {},
    const std::function<void(TrainingRun&, ddp::Checkpointer&)>& add = {}) {
  return load_on(
      2, [&](const Rank&) { return folder; }, options, add);
}

std::string step_folder(const TemporaryFolder& folder, int64_t step) {
  return folder.file(step == 1 ? "step-00000001" : "step-00000002");
}

// Checks that every rank threw that text and has its old state.
void check_refused(const std::vector<Outcome>& outcomes, const std::string& text) {
  for (const auto& outcome : outcomes) {
    CHECK_THAT(outcome.error, ContainsText(text));
    CHECK(outcome.error == outcomes.front().error);
    CHECK(outcome.unchanged);
  }
}

// Checks that step 1 is loaded where step 2 is damaged, with a warning that says why.
void check_falls_back(const TemporaryFolder& folder, const std::string& why) {
  const auto outcomes = load_in(folder.path());
  for (const auto& outcome : outcomes) {
    CHECK(outcome.error.empty());
    CHECK(outcome.step == 1);
  }
  REQUIRE(!outcomes.front().warnings.empty());
  CHECK_THAT(outcomes.front().warnings.back(), ContainsText("left out step 2: "));
  CHECK_THAT(outcomes.front().warnings.back(), ContainsText(why));
}

}  // namespace

TEST_CASE("CRC-32C has the values of its definition", "[checkpoint][pure]") {
  CHECK(ddp::crc32c(0, "", 0) == 0);
  CHECK(ddp::crc32c(0, "123456789", 9) == 0xE3069283);
  const std::string zeros(32, '\0');
  CHECK(ddp::crc32c(0, zeros.data(), zeros.size()) == 0x8A9136AA);
  CHECK(ddp::crc32c(ddp::crc32c(0, "1234567890", 3), "4567890", 6) == 0xE3069283);
}

TEST_CASE("every flipped bit and every cut of a manifest is found", "[checkpoint][pure]") {
  ddp::Manifest manifest;
  manifest.step = 12;
  manifest.library_version = "0.1.0";
  manifest.libtorch_version = "2.11.0";
  manifest.files = {{"model.pt", {5, 6}}, {"rank-0.pt", {7, 0xFFFFFFFF}}};
  const auto json = to_json(manifest);
  const auto again = ddp::parse_manifest(json, "m");
  CHECK(to_json(again) == json);
  CHECK(again.find("rank-0.pt")->sum == ddp::FileSum{7, 0xFFFFFFFF});
  size_t found = 0;
  for (size_t bit = 0; bit < 8 * json.size(); ++bit) {
    auto damaged = json;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    try {
      ddp::parse_manifest(damaged, "m");
    } catch (const ddp::DamagedCheckpoint&) {
      ++found;
    }
  }
  CHECK(found == 8 * json.size());
  for (size_t size = 0; size < json.size(); ++size) {
    CHECK_THROWS_AS(ddp::parse_manifest(json.substr(0, size), "m"), ddp::DamagedCheckpoint);
  }
}

TEST_CASE("a manifest and an index name files of their folder alone", "[checkpoint][pure]") {
  const std::string name = GENERATE("../x", "/etc/passwd", "a/b", "..", ".", "");
  CAPTURE(name);
  ddp::Manifest manifest;
  manifest.library_version = "0.1.0";
  manifest.libtorch_version = "2.11.0";
  manifest.files = {{"model.pt", {5, 6}}, {name, {7, 8}}};
  CHECK_THROWS_AS(ddp::parse_manifest(to_json(manifest), "m"), ddp::DamagedCheckpoint);
  manifest.files.pop_back();
  CHECK_NOTHROW(ddp::parse_manifest(to_json(manifest), "m"));
  const ddp::TensorBox whole{{0}, {4}};
  const ddp::IndexedTensor good{{at::kFloat, {4}}, {{"model.shard-00000.pt", "w", whole}}};
  manifest.index["model"]["w"] = good;
  CHECK_NOTHROW(ddp::parse_manifest(to_json(manifest), "m"));
  manifest.index["model"]["w"].boxes[0].file = name;
  CHECK_THROWS_AS(ddp::parse_manifest(to_json(manifest), "m"), ddp::DamagedCheckpoint);
}

TEST_CASE(
    "a damaged checkpoint is left out, and the one before is loaded",
    "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2});
  const auto newest = step_folder(folder, 2);
  for (const std::string name : {"model.pt", "sampler.pt", "rank-1.pt"}) {
    CAPTURE(name);
    const auto path = newest + "/" + name;
    const auto bytes = read_bytes(path);
    for (const size_t size : {size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
      write_bytes(path, bytes.substr(0, size));
      check_falls_back(folder, path + " is damaged");
    }
    auto flipped = bytes;
    flipped[bytes.size() / 3] = static_cast<char>(flipped[bytes.size() / 3] ^ 4);
    write_bytes(path, flipped);
    check_falls_back(folder, path + " is damaged");
    unlink(path.c_str());
    check_falls_back(folder, path + " is missing");
    write_bytes(path, bytes);
  }
  const auto manifest = read_bytes(newest + "/manifest.json");
  write_bytes(newest + "/manifest.json", manifest.substr(1));
  check_falls_back(folder, "its own checksum differs");
  unlink((newest + "/manifest.json").c_str());
  check_falls_back(folder, newest + " has no manifest.json");
  write_bytes(newest + "/manifest.json", manifest);
  CHECK(load_in(folder.path()).front().step == 2);
}

TEST_CASE("cut at every KiB, and any bit flipped, a file is refused", "[checkpoint][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 1, {1});
  const auto path = step_folder(folder, 1) + "/model.pt";
  const auto bytes = read_bytes(path);
  const auto expect_refusal = [&](const std::string& damaged) {
    write_bytes(path, damaged);
    const auto outcomes = load_on(1, [&](const Rank&) { return folder.path(); });
    return outcomes.front().error.find(path + " is damaged") != std::string::npos &&
           outcomes.front().unchanged;
  };
  for (size_t size = 0; size < bytes.size(); size += 1024)
    CHECK(expect_refusal(bytes.substr(0, size)));
  for (size_t i = 0; i < 40; ++i) {
    auto damaged = bytes;
    const size_t bit = i * 8 * bytes.size() / 40 + i % 8;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    CHECK(expect_refusal(damaged));
  }
}

TEST_CASE("a file with wrong bytes is read or refused, whatever they are", "[checkpoint][errors]") {
  const TemporaryFolder folder;
  torch::nn::Linear net(3, 2);
  const auto path = folder.file("model.pt");
  ddp::save_state_dict(*net, path);
  const auto bytes = read_bytes(path);
  const auto pickle = bytes.find("\x80\x02");
  REQUIRE(pickle != std::string::npos);
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    auto damaged = bytes;
    // Half of them within the pickle.
    const auto from = i % 2 == 0 ? pickle : 0;
    const auto end = i % 2 == 0 ? std::min(pickle + 400, bytes.size()) : bytes.size();
    for (unsigned n = 0; n <= random() % 3; ++n) {
      damaged[from + random() % (end - from)] = static_cast<char>(random());
    }
    write_bytes(path, damaged);
    const auto error = error_of([&] { ddp::load_state_dict(*net, path); });
    if (error.empty()) continue;
    ++refused;
    if (error.find(path) != 0) FAIL_CHECK(error);
  }
  CHECK(refused > 40);
}

TEST_CASE("nothing is loaded where all checkpoints are damaged", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2});
  for (const int64_t step : {1, 2}) write_bytes(step_folder(folder, step) + "/model.pt", "");
  check_refused(
      load_in(folder.path()),
      "expected a whole checkpoint in " + folder.path() + ", got none: " + step_folder(folder, 2));
}

TEST_CASE("a manifest of another format is refused", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2});
  const auto path = step_folder(folder, 2) + "/manifest.json";
  auto json = read_bytes(path);
  const auto sum = json.rfind("  \"crc32c\"");
  json = json.substr(0, sum);
  json.replace(json.find("\"format\": 1"), 11, "\"format\": 3");
  json +=
      "  \"crc32c\": \"" + ddp::hexadecimal(ddp::crc32c(0, json.data(), json.size())) + "\"\n}\n";
  write_bytes(path, json);
  check_refused(load_in(folder.path()), path + ": expected format 1 or 2 of checkpoints, got 3");
}

TEST_CASE("another model is refused, or loaded where not strict", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add("model", net).save(1);
    return 0;
  });
  const auto load = [&](torch::nn::Sequential net, bool strict) {
    const auto add = [&](TrainingRun&, ddp::Checkpointer& c) { c.add("model", net); };
    return load_in(folder.path(), ddp::CheckpointerOptions().strict(strict), add);
  };
  const auto file = step_folder(folder, 1) + "/model.pt";
  check_refused(
      load(torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::Linear(3, 5)), true),
      "on rank 0 of 2: " + file +
          ": expected the model's shapes and dtypes, but \"1.weight\" is [5, 3] Float in the model "
          "and [2, 3] Float in the file; \"1.bias\" is [5] Float in the model and [2]");
  torch::nn::Sequential doubles(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  doubles->to(torch::kDouble);
  check_refused(load(doubles, true), "\"0.weight\" is [3, 4] Double in the model and [3, 4] Float");
  CHECK(load(doubles, false).front().step == 1);
  torch::nn::Sequential other(torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false)));
  other->push_back("extra", torch::nn::Linear(1, 1));
  const std::string names =
      "the file lacks the model's \"extra.weight\", \"extra.bias\"; the model lacks the file's "
      "\"0.bias\", \"1.weight\", \"1.bias\"";
  check_refused(load(other, true), names);
  const auto outcomes = load(other, false);
  CHECK(outcomes.front().step == 1);
  CHECK_THAT(outcomes.front().warnings.back(), ContainsText(names));
}

TEST_CASE("another optimizer and other parts are refused", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1});
  check_refused(
      load_in(
          folder.path(), {},
          [](TrainingRun& run, ddp::Checkpointer& c) { c.add("model", run.model); }),
      "it has \"optimizer.pt\", \"scheduler.pt\", \"plateau.pt\", \"sampler.pt\", \"counter.pt\" "
      "besides");
  std::vector<std::shared_ptr<torch::optim::Optimizer>> kept(2);
  const auto with = [&](std::shared_ptr<torch::optim::Optimizer> (*make)(TrainingRun&)) {
    return load_in(
        folder.path(), ddp::CheckpointerOptions().strict(false),
        [&](TrainingRun& run, ddp::Checkpointer& c) {
          kept[run.rank] = make(run);
          c.add("model", run.model).add("optimizer", *kept[run.rank]);
        });
  };
  check_refused(
      with([](TrainingRun& run) -> std::shared_ptr<torch::optim::Optimizer> {
        return std::make_shared<torch::optim::AdamW>(run.net->parameters());
      }),
      "optimizer.pt (AdamW), group 0: expected \"decoupled_weight_decay\" to be true, as "
      "LibTorch's optimizer does it, got False");
  check_refused(
      with([](TrainingRun& run) -> std::shared_ptr<torch::optim::Optimizer> {
        return std::make_shared<torch::optim::SGD>(run.net->parameters(), 0.1);
      }),
      "optimizer.pt (SGD), group 0: expected \"momentum\", got a dictionary without");
  check_refused(
      with([](TrainingRun& run) -> std::shared_ptr<torch::optim::Optimizer> {
        auto some = run.net->parameters();
        some.pop_back();
        return std::make_shared<torch::optim::Adam>(some);
      }),
      "optimizer.pt (Adam): expected the 5 parameters of group 0, got 6");
}

TEST_CASE(
    "a part that refuses on one rank leaves all ranks as they were",
    "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 3, {1, 2});
  const auto outcomes = load_on(
      3, [&](const Rank&) { return folder.path(); }, {},
      [](TrainingRun& run, ddp::Checkpointer& c) {
        run.counter.refuses = run.rank == 1;
        run.add_to(c);
      });
  check_refused(
      outcomes, "Checkpointer: loading step 2 failed on rank 1 of 3: " + step_folder(folder, 2) +
                    "/counter.pt: Counter: refuses");
}

TEST_CASE("a rank that sees another folder is an error", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder, other;
  save_checkpoints(folder.path(), 2, {1, 2});
  const auto by_rank = [&](const Rank& self) {
    return self.rank == 0 ? folder.path() : other.path();
  };
  check_refused(
      load_on(2, by_rank),
      "rank 0 sees 1, 2 in " + folder.path() + " and rank 1 of 2 sees none in " + other.path());
  save_checkpoints(other.path(), 2, {2});
  check_refused(load_on(2, by_rank), "and rank 1 of 2 sees 2 in ");
  // The other folder has the same steps, of another run.
  const TemporaryFolder third;
  const auto by_third = [&](const Rank& self) {
    return self.rank == 0 ? folder.path() : third.path();
  };
  save_checkpoints(third.path(), 1, {1, 2});
  check_refused(
      load_on(2, by_third), "rank 0 sees one in " + step_folder(folder, 2) +
                                " and rank 1 of 2 another in " + step_folder(third, 2));

  const auto errors = errors_of_ranks(
      2, [&](const Rank& self) { ddp::Checkpointer(by_rank(self), options_of(self)).save(3); });
  CHECK_THAT(
      errors, Each(
                  ContainsText("saving step 3 failed on rank 1 of 2: expected to find ") &&
                  ContainsText("Name a folder that all ranks share")));
  CHECK(names_in(folder.path()).size() == 2);
  CHECK(names_in(other.path()).size() == 1);
}

TEST_CASE("ranks that save different steps or parts are an error", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    int64_t value = 0;
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add(self.rank == 0 ? "a" : "b", value);
    checkpointer.save(1);
  });
  CHECK_THAT(errors, Each(ContainsText("rank 0 saves step 1 of \"a\" and rank 1 step 1 of \"b\"")));
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("a file in the folder's place is an error on every rank", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "");
  for (const auto& path : {file, file + "/below"}) {
    CAPTURE(path);
    check_refused(load_on(2, [&](const Rank&) { return path; }), path);
    const auto errors = errors_of_ranks(
        2, [&](const Rank& self) { ddp::Checkpointer(path, options_of(self)).save(3); });
    CHECK_THAT(errors[0], ContainsText("saving step 3 failed on rank 0 of 2: " + file));
    CHECK(errors[1] == errors[0]);
  }
}

TEST_CASE("a save before the newest checkpoint is refused", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_checkpoints(folder.path(), 2, {1, 2});
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    run.add_to(checkpointer);
    checkpointer.save(1);
  });
  CHECK_THAT(
      errors, Each(ContainsText(
                  folder.path() + ": expected no checkpoint after step 1, got one of step 2")));
  // A damaged checkpoint does not count, and the next save removes it.
  write_bytes(step_folder(folder, 2) + "/model.pt", "");
  run_ranks<int>(2, [&](const Rank& self) {
    const Warnings warnings;
    TrainingRun run(self);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    run.add_to(checkpointer);
    TORCH_CHECK(checkpointer.load_latest() == 1);
    checkpointer.save(1);
    checkpointer.wait();
    return 0;
  });
  CHECK(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
}

TEST_CASE("invalid options, names and steps are refused", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  run_ranks<int>(1, [&](const Rank& self) {
    const auto error_with = [&](const ddp::CheckpointerOptions& options) {
      return error_of<c10::ValueError>([&] { ddp::Checkpointer(folder.path(), options); });
    };
    TORCH_CHECK(!error_with(options_of(self).keep_last(-1)).empty());
    TORCH_CHECK(!error_with(options_of(self).every_steps(-1)).empty());
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    int64_t value = 0;
    checkpointer.add("value", value);
    for (const auto* name : {"", "value", ".hidden", "a/b", "rank-1", "a b", "a.shard-0"}) {
      TORCH_CHECK(!error_of<c10::ValueError>([&] { checkpointer.add(name, value); }).empty(), name);
    }
    torch::nn::Linear none(nullptr);
    TORCH_CHECK(!error_of<c10::ValueError>([&] { checkpointer.add("none", none); }).empty());
    TORCH_CHECK(error_of([&] {
                  checkpointer.save(-1);
                }).find("expected a step >= 0, got -1") != std::string::npos);
    return 0;
  });
}

TEST_CASE(
    "a disk that is full, read-only or gone is an error on every rank",
    "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  SmallDisk disk(folder.file("disk"));
  if (disk.is_missing()) return;
  // Returns every rank's error of a background write, thrown by the next call.
  const auto save_large = [&](int64_t elements) {
    return errors_of_ranks(2, [&](const Rank& self) {
      at::Tensor large = torch::rand({elements});
      ddp::Checkpointer checkpointer(disk.path(), options_of(self));
      checkpointer.add("large", large);
      checkpointer.save(elements);
      checkpointer.wait();
    });
  };
  CHECK(save_large(100) == std::vector<std::string>{"", ""});
  const auto check_failed = [&](const std::vector<std::string>& errors, const std::string& text) {
    CHECK_THAT(
        errors, Each(ContainsText("failed on rank 0 of 2: " + disk.path()) && ContainsText(text)));
  };
  check_failed(save_large(1000000), "got \"No space left on device\". Free space there");
  CHECK(names_in(disk.path()) == std::vector<std::string>{"step-00000100"});
  REQUIRE(disk.make_read_only());
  check_failed(save_large(2000000), "got \"Read-only file system\"");

  // The file system disappears during a background write, and before a load.
  SmallDisk leaving(folder.file("leaving"));
  REQUIRE(leaving.is_mounted());
  const auto path = folder.file("leaving/checkpoints");
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(path, options_of(self));
    checkpointer.save(1);
    checkpointer.wait();
    if (self.rank == 0) leaving.unmount();
    ddp::barrier(self.group);
    checkpointer.load(1);
  });
  CHECK_THAT(
      errors, Each(ContainsText("expected a checkpoint of step 1 in " + path + ", got none")));
}
