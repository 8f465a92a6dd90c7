// Parts of a checkpoint that are cut over the ranks: saved on some, loaded on others.
#include <algorithm>
#include <random>

#include "checkpoint/checkpointer/sharded_parts.h"
#include "checkpoint/checkpointing.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::ShardedTensor;

std::map<std::string, at::Tensor> whole_tensors() {
  return {
      {"cube", torch::arange(7 * 5 * 3, torch::kFloat).view({7, 5, 3})},
      {"row", torch::arange(11, torch::kDouble)},
      {"square", torch::arange(64).view({8, 8}).to(torch::kBFloat16)},
      {"four", torch::arange(2 * 3 * 4 * 5, torch::kInt).view({2, 3, 4, 5})},
      {"step", torch::tensor(3)},
      {"nothing", torch::zeros({4, 0})}};
}

at::Tensor box_of(const at::Tensor& whole, const ShardedTensor& shard) {
  auto view = whole;
  for (size_t d = 0; d < shard.offset.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    view = view.narrow(dim, shard.offset[d], shard.local.size(dim));
  }
  return view;
}

// Copies a box into memory of its own, with its dimensions in reverse order.
at::Tensor strided_copy(const at::Tensor& box) {
  std::vector<int64_t> reverse;
  for (auto d = box.dim(); d-- > 0;) reverse.push_back(d);
  return box.permute(reverse).contiguous().permute(reverse);
}

// Cuts each tensor at random, the same way on every rank, and gives each box to a rank, or to all
// as replicas. Returns the shards of one rank.
std::vector<ShardedTensor> random_shards(int rank, int size, unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  std::vector<ShardedTensor> own;
  for (const auto& [name, whole] : whole_tensors()) {
    std::vector<ShardedTensor> boxes{
        {name, whole.sizes().vec(), std::vector<int64_t>(whole.dim(), 0), whole}};
    for (auto cuts = whole.dim() == 0 ? 0 : draw(2 * size); cuts > 0; --cuts) {
      auto& box = boxes[draw(static_cast<int64_t>(boxes.size()) - 1)];
      const auto dim = draw(whole.dim() - 1);
      const auto at = draw(box.local.size(dim));
      auto rest = box;
      rest.offset[dim] += at;
      rest.local = box.local.narrow(dim, at, box.local.size(dim) - at);
      box.local = box.local.narrow(dim, 0, at);
      boxes.push_back(rest);
    }
    for (auto& box : boxes) {
      const auto owner = draw(size);
      if (owner != rank && owner != size) continue;
      box.local = strided_copy(box.local);
      if (owner == size) box.replica = rank;
      own.push_back(box);
    }
  }
  return own;
}

void save_random(const std::string& folder, int size, unsigned seed, int64_t step = 1) {
  run_ranks<int>(size, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder, options_of(self));
    checkpointer.add_sharded("model", [&] { return random_shards(self.rank, size, seed); });
    checkpointer.save(step);
    checkpointer.wait();
    return 0;
  });
}

// Returns how many elements differ from those that were saved.
int64_t load_random(const Rank& self, const std::string& folder, unsigned seed) {
  auto shards = random_shards(self.rank, self.size, seed);
  for (auto& shard : shards) shard.local.fill_(-1);
  ddp::Checkpointer checkpointer(folder, options_of(self));
  checkpointer.add_sharded("model", [&] { return shards; });
  TORCH_CHECK(checkpointer.load_latest() == 1);
  int64_t wrong = 0;
  const auto whole = whole_tensors();
  for (const auto& shard : shards) {
    wrong += shard.local.ne(box_of(whole.at(shard.name), shard)).sum().item<int64_t>();
  }
  return wrong;
}

// Rank r has the rows from r on, `rows` of them, of a weight of as many rows as ranks.
std::vector<ShardedTensor> rows_of(const Rank& self, const at::Tensor& local, int64_t size) {
  return {{"weight", {size, 4}, {self.rank, 0}, local}};
}

/// A rank's errors, and its row after them.
struct RowOutcome {
  std::string error;
  float value = 0;
  std::vector<std::string> warnings;
};

// Saves the rows 1, 2, ... of "weight" on 2 ranks; then loads what `shards` returns.
std::vector<RowOutcome> load_after_rows(
    const TemporaryFolder& folder, bool strict,
    const std::function<std::vector<ShardedTensor>(const Rank&, const at::Tensor&)>& shards) {
  return run_ranks<RowOutcome>(2, [&](const Rank& self) {
    const Warnings warnings;
    auto local = torch::full({1, 4}, 1.0 + self.rank);
    ddp::Checkpointer(folder.path(), options_of(self))
        .add_sharded("model", [&] { return rows_of(self, local, 2); })
        .save(1);
    ddp::barrier(self.group);
    local.fill_(-1);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self).strict(strict));
    checkpointer.add_sharded("model", [&] { return shards(self, local); });
    RowOutcome outcome;
    outcome.error = error_of([&] { checkpointer.load(1); });
    outcome.value = local[0][3].item<float>();
    outcome.warnings = warnings.texts;
    ddp::barrier(self.group);
    return outcome;
  });
}

std::vector<std::string> errors_of_save(
    const std::string& folder, int size,
    const std::function<std::vector<ShardedTensor>(const Rank&)>& shards) {
  return errors_of_ranks(size, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder, options_of(self));
    checkpointer.add_sharded("model", [&] { return shards(self); });
    const auto error = error_of([&] { checkpointer.save(1); });
    ddp::barrier(self.group);
    TORCH_CHECK(error.empty(), error);
  });
}

}  // namespace

TEST_CASE("a sharded part loads on any number of ranks and any cut", "[checkpoint][ranks]") {
  const int saved_on = GENERATE(1, 2, 3, 4);
  const TemporaryFolder folder;
  save_random(folder.path(), saved_on, 10 + static_cast<unsigned>(saved_on));
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(saved_on, size);
    // The last seed is that of the save where the sizes are equal.
    for (const unsigned seed : {1, 2, 10 + size}) {
      const auto wrong = run_ranks<int64_t>(
          size, [&](const Rank& self) { return load_random(self, folder.path(), seed); });
      CHECK(wrong == std::vector<int64_t>(static_cast<size_t>(size), 0));
    }
  }
}

TEST_CASE("each rank writes its own shards, and replicas once", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(3, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    // Rank 2 has the same as rank 1, and writes no file of its own.
    const int64_t owner = std::min(self.rank, 1);
    checkpointer.add_sharded("model", [&] {
      return std::vector<ShardedTensor>{
          {"w", {2, 4}, {owner, 0}, torch::full({1, 4}, double(owner)), self.rank / 2}};
    });
    for (int64_t step = 1; step <= 4; ++step) checkpointer.save(step);
    checkpointer.wait();
    return 0;
  });
  auto names = names_in(folder.path());
  CHECK(names.size() == 3);
  names = names_in(folder.file("step-00000004"));
  std::sort(names.begin(), names.end());
  CHECK(
      names == std::vector<std::string>{
                   "manifest.json", "model.shard-00000.pt", "model.shard-00001.pt", "rank-0.pt",
                   "rank-1.pt", "rank-2.pt"});
  const auto file = folder.file("step-00000004/model.shard-00001.pt");
  const auto dict = ddp::read_torch_file(file).toGenericDict();
  CHECK(dict.size() == 1);
  CHECK(torch::equal(dict.at("w/1,0").toTensor(), torch::ones({1, 4})));
}

TEST_CASE("layouts are exchanged once, until one changes", "[checkpoint][ranks]") {
  const auto changes = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    std::vector<std::string> seen;
    at::Tensor local = torch::ones({1, 4});
    ddp::CheckpointPeers peers(self.group);
    ddp::ShardedParts sharded;
    sharded.add("model", [&] { return rows_of(self, local, 2); });
    const auto exchange = [&] {
      sharded.refresh();
      seen.push_back(sharded.change());
      sharded.exchange(peers, peers.gather(sharded.change(), "testing"), "testing");
    };
    exchange();
    local = torch::zeros({1, 4});
    exchange();
    // No collective: the other rank does not take part in it.
    if (self.rank == 0) sharded.exchange(peers, {"", ""}, "testing");
    if (self.rank == 1) local = local.narrow(1, 0, 2);
    exchange();
    exchange();
    TORCH_CHECK(error_of([&] { sharded.index(); }).find("owners of 6 of 8") != std::string::npos);
    return seen;
  });
  CHECK(changes[0] == std::vector<std::string>{"changed", "", "", ""});
  CHECK(changes[1] == std::vector<std::string>{"changed", "", "changed", ""});
}

TEST_CASE("shards of two owners, or of none, cannot be saved", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& text,
                         const std::function<std::vector<ShardedTensor>(const Rank&)>& shards) {
    CAPTURE(text);
    for (const auto& error : errors_of_save(folder.path(), 3, shards)) {
      CHECK_THAT(error, ContainsText(text));
    }
    CHECK(names_in(folder.path()).empty());
  };
  check(
      "Checkpointer: expected one owner of weight [1:2, 0:4] in part \"model\", got ranks 0 and 1.",
      [](const Rank& self) {
        return rows_of(self, torch::ones({self.rank == 0 ? 2 : 1, 4}), 3);
      });
  check("got owners of 12 of 16", [](const Rank& self) {
    return rows_of(self, torch::ones({1, 4}), 4);
  });
  check(
      "one shape and dtype, got [3, 4] Float on rank 0 and [4, 4] Float on rank 1 of 3",
      [](const Rank& self) {
        return rows_of(self, torch::ones({1, 4}), 3 + self.rank);
      });
  check(
      "saving step 1 failed on rank 2 of 3: Checkpointer::add_sharded: expected the shard of "
      "\"weight\" in part \"model\" to lie within [2, 4], got [1, 4] at [2, 0]",
      [](const Rank& self) {
        return rows_of(self, torch::ones({1, 4}), 2 + (self.rank < 2));
      });
  check("saving step 1 failed on rank 1 of 3: no memory", [](const Rank& self) {
    TORCH_CHECK(self.rank != 1, "no memory");
    return rows_of(self, torch::ones({1, 4}), 3);
  });
  check("expected shards with a name, a tensor and a replica >= 0", [](const Rank& self) {
    return rows_of(self, self.rank == 0 ? at::Tensor() : torch::ones({1, 4}), 3);
  });
  check("expected tensors with a dense storage, got a Sparse one", [](const Rank& self) {
    return rows_of(self, torch::ones({1, 4}).to_sparse(), 3);
  });
}

TEST_CASE("ranks that add different sharded parts are an error", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    if (self.rank == 1)
      checkpointer.add_sharded("model", [] { return std::vector<ShardedTensor>(); });
    const auto of_load = error_of([&] { checkpointer.load_latest(); });
    TORCH_CHECK(of_load.find("got [] on rank 0 and [model] on rank 1 of 2") != std::string::npos);
    checkpointer.save(1);
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText("\"model\" (sharded)"));
}

TEST_CASE("shards that do not fit change nothing", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& text, const auto& shards) {
    const auto outcomes = load_after_rows(folder, /*strict=*/true, shards);
    for (const auto& outcome : outcomes) {
      CHECK_THAT(outcome.error, ContainsText(text));
      CHECK(outcome.error == outcomes[0].error);
      CHECK(outcome.value == -1);
    }
  };
  // Only rank 1 has the name.
  check(
      "part \"model\": expected the program's names, but the checkpoint lacks the program's "
      "\"bias\"",
      [](const Rank& self, const at::Tensor& local) {
        auto shards = rows_of(self, local, 2);
        if (self.rank == 1) shards.push_back({"bias", {1}, {0}, torch::ones({1})});
        return shards;
      });
  check(
      "the checkpoint lacks the program's \"other\"; the program lacks the checkpoint's \"weight\"",
      [](const Rank& self, const at::Tensor& local) {
        auto shards = rows_of(self, local, 2);
        shards[0].name = "other";
        return shards;
      });
  check(
      "\"weight\" is [3, 4] Float in the program and [2, 4] Float in the checkpoint",
      [](const Rank& self, const at::Tensor& local) { return rows_of(self, local, 3); });
  check(
      "\"weight\" is [2, 4] Double in the program and [2, 4] Float in the checkpoint",
      [](const Rank& self, const at::Tensor& local) {
        return rows_of(self, local.to(torch::kDouble), 2);
      });
}

TEST_CASE("shards load without strict what fits", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  std::vector<at::Tensor> doubles{
      torch::zeros({1, 4}, torch::kDouble), torch::zeros({1, 4}, torch::kDouble)};
  const auto outcomes =
      load_after_rows(folder, /*strict=*/false, [&](const Rank& self, const at::Tensor& local) {
        auto shards = rows_of(self, doubles[self.rank], 2);
        shards.push_back({"bias", {2, 4}, {self.rank, 0}, local});
        return shards;
      });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.error.empty());
    CHECK(outcome.value == -1);
  }
  REQUIRE(!outcomes[0].warnings.empty());
  CHECK_THAT(
      outcomes[0].warnings.back(), ContainsText("the checkpoint lacks the program's \"bias\""));
  CHECK(torch::equal(doubles[1], torch::full({1, 4}, 2.0, torch::kDouble)));
}

TEST_CASE("a load may need only some elements, and writes parameters", "[checkpoint][ranks]") {
  const TemporaryFolder folder;
  std::vector<at::Tensor> parameters{
      torch::zeros({2, 1}).requires_grad_(), torch::zeros({2, 1}).requires_grad_()};
  const auto outcomes =
      load_after_rows(folder, /*strict=*/true, [&](const Rank& self, const at::Tensor&) {
        return std::vector<ShardedTensor>{
            {"weight", {2, 4}, {0, self.rank}, parameters[self.rank]}};
      });
  for (const auto& outcome : outcomes) CHECK(outcome.error.empty());
  for (const auto& parameter : parameters) {
    CHECK(torch::equal(parameter.detach(), torch::tensor({{1.0F}, {2.0F}})));
    CHECK(parameter.requires_grad());
  }
}

TEST_CASE("a damaged shard file is found before any rank changes", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  save_random(folder.path(), 2, 12, 1);
  save_random(folder.path(), 2, 12, 2);
  const auto file = folder.file("step-00000002/model.shard-00001.pt");
  auto bytes = read_bytes(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_bytes(file, bytes);
  for (const int size : {1, 3}) {
    const auto wrong = run_ranks<int64_t>(size, [&](const Rank& self) {
      const Warnings warnings;
      const auto elements = load_random(self, folder.path(), 1);
      TORCH_CHECK(self.rank != 0 || warnings.count(file + " is damaged") == 1);
      return elements;
    });
    CHECK(wrong == std::vector<int64_t>(static_cast<size_t>(size), 0));
  }
}

TEST_CASE("a part that was saved whole is not one that is sharded", "[checkpoint][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    at::Tensor whole = torch::ones({2, 4});
    at::Tensor local = torch::ones({1, 4});
    ddp::Checkpointer(folder.path(), options_of(self)).add("model", whole).save(1);
    ddp::barrier(self.group);
    ddp::Checkpointer checkpointer(folder.path(), options_of(self));
    checkpointer.add_sharded("model", [&] { return rows_of(self, local, 2); });
    checkpointer.load(1);
  });
  CHECK_THAT(
      errors, Each(ContainsText("it lacks \"model.shard-*.pt\", and it has \"model.pt\" besides")));
}
