// Checkpoints of a thousand ranks: what is counted is linear in their number.
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <ddp/consolidate_checkpoint.h>
#include <torch/torch.h>

#include "checkpoint/files/folder.h"
#include "checkpoint/python/torch_file.h"
#include "checkpoint/shards/box.h"
#include "checkpoint/shards/shard_index.h"
#include "checkpoint/shards/shard_reader.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::TensorBox;
using ddp::testing::TemporaryFolder;

constexpr int kTensors = 3;
constexpr int64_t kWidth = 2;
constexpr int64_t kStep = 7;

std::string tensor_name(int tensor) { return "weight" + std::to_string(tensor); }

/// How many pairs are compared; -1 where two boxes overlap.
int64_t compared_pairs(const std::vector<TensorBox>& boxes) {
  std::vector<const TensorBox*> pointers;
  for (const auto& box : boxes) pointers.push_back(&box);
  int64_t compared = 0;
  return ddp::find_overlap(pointers, &compared) ? -1 : compared;
}

at::Tensor whole_tensor(int tensor, int64_t ranks) {
  return torch::arange(ranks * kWidth, torch::kFloat).view({ranks, kWidth}) + 0.5 * tensor;
}

/// A checkpoint of a model whose tensors have a row on each rank.
ddp::Manifest write_checkpoint(int ranks, const std::string& path) {
  ddp::Manifest manifest;
  manifest.step = kStep;
  manifest.world_size = ranks;
  const auto folder = ddp::CheckpointFolder(path).path_of(kStep);
  ddp::make_folders(folder);
  std::vector<std::vector<ddp::ShardLayout>> layouts(static_cast<size_t>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    auto dict = ddp::make_dict();
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const TensorBox box{{rank, 0}, {1, kWidth}};
      const auto name = tensor_name(tensor);
      layouts[static_cast<size_t>(rank)].push_back({name, {at::kFloat, {ranks, kWidth}}, box});
      dict.insert(
          ddp::shard_key(name, box), whole_tensor(tensor, ranks).narrow(0, rank, 1).clone());
    }
    const auto file = ddp::shard_file("model", static_cast<int>(rank));
    ddp::replace_torch_file(folder + "/" + file, [&]() -> c10::IValue { return dict; });
    manifest.files.push_back({file, ddp::sum_of_file(folder + "/" + file)});
  }
  manifest.index["model"] = ddp::make_index("model", layouts);
  ddp::write_whole_file(folder + "/" + ddp::kManifestName, to_json(manifest));
  return manifest;
}

}  // namespace

TEST_CASE("boxes of a grid are compared with few others", "[checkpoint][pure]") {
  constexpr int64_t kRanks = 1024;
  std::vector<TensorBox> rows, columns, grid;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    rows.push_back({{2 * rank, 0}, {2, 5}});
    columns.push_back({{0, 2 * rank}, {5, 2}});
    grid.push_back({{rank / 32, 3 * (rank % 32)}, {1, 3}});
  }
  // As FullyShardedDataParallel cuts: a row's end, whole rows, a row's begin.
  std::vector<TensorBox> elements;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    for (auto& box : ddp::boxes_of({{0, 0}, {7 * kRanks, 3}}, 20 * rank, 20 * rank + 20)) {
      elements.push_back(std::move(box));
    }
  }
  for (const auto* boxes : {&rows, &columns, &grid, &elements}) {
    const auto compared = compared_pairs(*boxes);
    CHECK(compared >= 0);
    CHECK(compared <= 4 * kRanks);
  }
  columns.push_back({{4, 777}, {1, 1}});
  CHECK(compared_pairs(columns) == -1);
}

TEST_CASE("boxes overlap where a pair of them does", "[checkpoint][pure]") {
  std::mt19937 random(11);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int overlaps = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto dims = draw(1, 3);
    std::vector<TensorBox> boxes(static_cast<size_t>(draw(0, 12)));
    for (auto& box : boxes) {
      for (int64_t d = 0; d < dims; ++d) {
        box.offset.push_back(draw(0, 9));
        box.size.push_back(draw(0, 3));
      }
    }
    bool expected = false;
    for (size_t a = 0; a < boxes.size(); ++a) {
      for (size_t b = a + 1; b < boxes.size(); ++b) {
        expected = expected || ddp::intersection(boxes[a], boxes[b]).has_value();
      }
    }
    std::vector<const TensorBox*> pointers;
    for (const auto& box : boxes) pointers.push_back(&box);
    const auto found = ddp::find_overlap(pointers);
    REQUIRE(found.has_value() == expected);
    if (!found) continue;
    ++overlaps;
    REQUIRE(found->first < found->second);
    REQUIRE(
        ddp::intersection(boxes[found->first], boxes[found->second])->size == found->common.size);
  }
  CHECK(overlaps > 100);
  CHECK(overlaps < 1900);
}

TEST_CASE("each file of a large checkpoint is read once for all tensors", "[checkpoint][pure]") {
  constexpr int kRanks = 300;  // more files than are open at once
  const TemporaryFolder folder;
  const auto manifest = write_checkpoint(kRanks, folder.path());
  const auto step = ddp::CheckpointFolder(folder.path()).path_of(kStep);

  SECTION("by a reader") {
    ddp::ShardReader reader("model", manifest, step);
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const auto into = torch::zeros({kRanks, kWidth});
      reader.add(reader.index().at(tensor_name(tensor)), {{0, 0}, {kRanks, kWidth}}, into);
      reader.read();
      CHECK(torch::equal(into, whole_tensor(tensor, kRanks)));
    }
    CHECK(reader.dictionaries_read() == kRanks);
  }
  SECTION("where it is consolidated") {
    ddp::consolidate_checkpoint(folder.path(), kStep, folder.file("whole.pt"));
    const auto whole = ddp::read_torch_file(folder.file("whole.pt")).toGenericDict();
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      CHECK(torch::equal(whole.at(tensor_name(tensor)).toTensor(), whole_tensor(tensor, kRanks)));
    }
  }
}
