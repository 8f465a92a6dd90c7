// Folders of checkpoints that another program has changed, and saves after a failed one.
#include "checkpoint/checkpointing.h"

#include <chrono>
#include <cstdio>

#include "checkpoint/python/optimizer_dict.h"
#include "checkpoint/python/torch_file.h"
#include "support/warnings.h"

#include "checkpoint/small_disk.h"
#include "support/catch.h"

namespace {

using namespace ddp::testing;

// Returns the errors of two ranks that save and load only a text.
std::vector<std::string> errors_of_pair(
    const std::string& folder, const std::function<void(ddp::Checkpointer&, std::string&)>& body) {
  return errors_of_ranks(2, [&](const Rank& self) {
    const Warnings warnings;
    std::string text = "first";
    ddp::Checkpointer checkpointer(folder, options_of(self));
    checkpointer.add("text", text);
    body(checkpointer, text);
  });
}

const std::vector<std::string> kNoErrors{"", ""};

void save_texts(const std::string& folder, const std::vector<int64_t>& steps) {
  const auto errors = errors_of_pair(folder, [&](ddp::Checkpointer& checkpointer, std::string&) {
    for (const auto step : steps) checkpointer.save(step);
    checkpointer.wait();
  });
  REQUIRE(errors == kNoErrors);
}

}  // namespace

TEST_CASE("a checkpoint under another step's name is refused", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_texts(folder.path(), {1});
  const auto renamed = folder.file("step-00000007");
  REQUIRE(std::rename(folder.file("step-00000001").c_str(), renamed.c_str()) == 0);
  const auto errors = errors_of_pair(folder.path(), [](ddp::Checkpointer& c, std::string& text) {
    text = "kept";
    const auto error = error_of([&] { c.load_latest(); });
    TORCH_CHECK(text == "kept", error);
    TORCH_CHECK(error.empty(), error);
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText(renamed + ": expected the checkpoint of step 7, as its name") &&
                  ContainsText("got that of step 1")));
}

TEST_CASE("a file in the place of a checkpoint is left out", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_texts(folder.path(), {1});
  folder.write("step-00000002", "");
  const auto errors = errors_of_pair(folder.path(), [](ddp::Checkpointer& c, std::string&) {
    TORCH_CHECK(c.steps() == std::vector<int64_t>{1});
    TORCH_CHECK(c.load_latest() == 1);
    c.save(3);
    c.wait();
    TORCH_CHECK(c.load_latest() == 3);
  });
  CHECK(errors == kNoErrors);
}

TEST_CASE("a failed save does not affect the next one", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  SmallDisk disk(folder.file("disk"));
  if (disk.is_missing()) return;
  save_texts(disk.path(), {1, 5});
  write_bytes(disk.path() + "/step-00000005/text.pt", "");
  const auto errors = errors_of_pair(disk.path(), [](ddp::Checkpointer& c, std::string& text) {
    TORCH_CHECK(c.load_latest() == 1);  // 5 is damaged
    text.assign(size_t{1} << 21, 'x');
    c.save(2);
    const auto error = error_of([&] { c.wait(); });
    TORCH_CHECK(error.find("No space left on device") != std::string::npos, error);
    text = "third";
    c.save(3);  // the damaged step is still recorded, and is removed now
    c.wait();
    TORCH_CHECK((c.steps() == std::vector<int64_t>{1, 3}));
  });
  CHECK(errors == kNoErrors);
}

TEST_CASE("rank 0 reports a rank that cannot write", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  SmallDisk disk(folder.file("disk"));
  if (disk.is_missing()) return;
  const auto ended_after = run_ranks<double>(3, [&](const Rank& self) {
    const Warnings warnings;
    std::string text(self.rank == 1 ? size_t{1} << 21 : 1, 'x');
    auto begin = std::chrono::steady_clock::now();
    {
      ddp::Checkpointer checkpointer(disk.path(), options_of(self));
      checkpointer.add_per_rank("text", text);
      checkpointer.save(1);
    }
    // The other rank has ended and cannot report its failure, so its file in the folder has to.
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    ddp::barrier(self.group);
    return passed.count();
  });
  for (const auto seconds : ended_after) CHECK(seconds < 30);
  CHECK(names_in(disk.path()).empty());
}

TEST_CASE("an option with a large value has a short error text", "[checkpoint][errors][pure]") {
  // Printed in full, it would have 2^60 elements.
  c10::IValue pairs(0.1);
  for (int i = 0; i < 60; ++i) pairs = c10::ivalue::Tuple::create({pairs, pairs});
  torch::optim::SGD optimizer(torch::nn::Linear(1, 1)->parameters(), 0.1);
  auto saved = ddp::optimizer_dict(optimizer);
  saved.toGenericDict()
      .at("param_groups")
      .toList()
      .get(0)
      .toGenericDict()
      .insert_or_assign("lr", pairs);
  CHECK_THAT(
      error_of([&] { ddp::prepare_optimizer(optimizer, saved, "optimizer.pt"); }),
      ContainsText("expected \"lr\" to be a number, got a Tuple"));
}
