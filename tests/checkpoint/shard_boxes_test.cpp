// Boxes of tensors that are cut over ranks: pure functions, and the index of a checkpoint.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/shards/box.h"
#include "checkpoint/shards/shard_index.h"
#include "support/error_of.h"

#include "support/catch.h"

namespace {

using ddp::ShardLayout;
using ddp::TensorBox;
using ddp::testing::error_of;

int64_t draw(std::mt19937& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

// Cuts a box again and again along any dimension, anywhere.
std::vector<TensorBox> random_cut(const TensorBox& whole, std::mt19937& random) {
  std::vector<TensorBox> boxes{whole};
  for (auto cuts = draw(random, 0, 6); cuts > 0; --cuts) {
    auto& box = boxes[static_cast<size_t>(draw(random, 0, static_cast<int64_t>(boxes.size()) - 1))];
    const auto d = static_cast<size_t>(draw(random, 0, static_cast<int64_t>(box.size.size()) - 1));
    const auto at = draw(random, 0, box.size[d]);
    auto rest = box;
    box.size[d] = at;
    rest.offset[d] += at;
    rest.size[d] -= at;
    boxes.push_back(rest);
  }
  return boxes;
}

TensorBox random_whole(std::mt19937& random) {
  TensorBox whole;
  for (auto dims = draw(random, 1, 4); dims > 0; --dims) {
    whole.offset.push_back(0);
    whole.size.push_back(draw(random, 1, 6));
  }
  return whole;
}

ShardLayout layout(const std::string& name, std::vector<int64_t> sizes, TensorBox box) {
  return {name, {at::kFloat, std::move(sizes)}, std::move(box), /*replica=*/0};
}

at::Tensor view_of(const at::Tensor& tensor, const TensorBox& box) {
  auto view = tensor;
  for (size_t d = 0; d < box.size.size(); ++d) {
    view = view.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
  }
  return view;
}

// Reads `part` out of the elements of `whole`, which lie row by row, as a load does.
at::Tensor read_runs(const at::Tensor& elements, const TensorBox& whole, const TensorBox& part) {
  std::vector<at::Tensor> pieces;
  for (const auto& run : ddp::runs_of(part, whole)) {
    pieces.push_back(elements.narrow(0, run.first, run.count));
  }
  return torch::cat(pieces).view(part.size);
}

}  // namespace

TEST_CASE("boxes of random cuts: each element is saved once and loaded", "[checkpoint][pure]") {
  const auto seed = GENERATE(1U, 2U, 3U);
  std::mt19937 random(seed);
  for (int i = 0; i < 200; ++i) {
    const auto whole = random_whole(random);
    const auto saved = random_cut(whole, random);
    const auto loaded = random_cut(whole, random);
    const auto value = torch::arange(c10::multiply_integers(whole.size)).view(whole.size);
    const auto count = torch::zeros(whole.size, torch::kLong);
    for (const auto& box : saved) view_of(count, box).add_(1);
    INFO("seed " << seed << ", case " << i << ", " << ddp::box_text(whole));
    REQUIRE(count.eq(1).all().item<bool>());

    for (const auto& own : loaded) {
      auto result = torch::full(own.size, -1, torch::kLong);
      for (const auto& from : saved) {
        const auto box = ddp::intersection(own, from);
        CHECK(box.has_value() == ddp::intersection(from, own).has_value());
        if (!box) continue;
        auto relative = *box;
        for (size_t d = 0; d < own.size.size(); ++d) relative.offset[d] -= own.offset[d];
        const auto record = view_of(value, from).contiguous().view(-1);
        view_of(result, relative).copy_(read_runs(record, from, *box));
      }
      REQUIRE(torch::equal(result, view_of(value, own)));
    }
  }
}

TEST_CASE("runs are as long as the cut allows", "[checkpoint][pure]") {
  const TensorBox whole{{0, 0, 0}, {4, 6, 5}};
  CHECK(ddp::runs_of(whole, whole).size() == 1);
  CHECK(ddp::runs_of({{1, 0, 0}, {2, 6, 5}}, whole).size() == 1);
  CHECK(ddp::runs_of({{1, 2, 0}, {2, 3, 5}}, whole).size() == 2);
  const auto runs = ddp::runs_of({{1, 2, 1}, {2, 3, 2}}, whole);
  CHECK(runs.size() == 6);
  CHECK(runs[0].first == 41);
  CHECK(runs[0].count == 2);
  CHECK(ddp::runs_of({}, {}).front().count == 1);
  CHECK(ddp::intersection({}, {}).has_value());
  CHECK(!ddp::intersection({{0}, {3}}, {{3}, {2}}));
  CHECK(!ddp::intersection({{0}, {3}}, {{1}, {0}}));
}

TEST_CASE("an index has an owner of each element, or the error names it", "[checkpoint][pure]") {
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const auto whole = random_whole(random);
    std::vector<std::vector<ShardLayout>> ranks(3);
    for (const auto& box : random_cut(whole, random)) {
      ranks[static_cast<size_t>(draw(random, 0, 2))].push_back(layout("w", whole.size, box));
    }
    int64_t elements = 0;
    const auto index = ddp::make_index("p", ranks);
    for (const auto& box : index.at("w").boxes) elements += c10::multiply_integers(box.box.size);
    REQUIRE(elements == c10::multiply_integers(whole.size));

    // A part of the tensor again, on one more rank: two owners, or none where it replaces one.
    TensorBox part = whole;
    part.offset[0] = whole.size[0] - 1;
    part.size[0] = 1;
    auto twice = ranks;
    twice.push_back({layout("w", whole.size, part)});
    const auto error = error_of<c10::ValueError>([&] { ddp::make_index("p", twice); });
    REQUIRE(error.find("expected one owner of w [") != std::string::npos);
    REQUIRE(error.find(" and 3. Give") != std::string::npos);
    twice.back().front().replica = 1;
    REQUIRE(
        ddp::make_index("p", twice).at("w").boxes.size() ==
        ddp::make_index("p", ranks).at("w").boxes.size());
    for (auto& rank : ranks) rank.clear();
    ranks[1].push_back(layout("w", {whole.size[0] + 1}, {{0}, {whole.size[0]}}));
    REQUIRE_THROWS_WITH(
        ddp::make_index("p", ranks), ContainsText("expected an owner of every element of w"));
  }
}

TEST_CASE("the texts of index errors name ranks, name and box", "[checkpoint][pure]") {
  const auto error_with = [](const std::vector<std::vector<ShardLayout>>& ranks) {
    return error_of<c10::ValueError>([&] { ddp::make_index("model", ranks); });
  };
  const auto fc = [](int64_t begin, int64_t size) {
    return layout("blocks.0.fc.weight", {8, 4}, {{begin, 0}, {size, 4}});
  };
  CHECK_THAT(
      error_with({{fc(0, 4)}, {fc(4, 4)}, {fc(2, 4)}}),
      ContainsText("expected one owner of blocks.0.fc.weight [2:4, 0:4] in part \"model\", got "
                   "ranks 0 and 2. "));
  CHECK_THAT(error_with({{fc(0, 4), fc(0, 4)}, {fc(4, 4)}}), ContainsText("got rank 0 twice. "));
  CHECK_THAT(
      error_with({{fc(0, 4)}, {fc(5, 3)}}),
      ContainsText("expected an owner of every element of blocks.0.fc.weight [8, 4] Float in part "
                   "\"model\", got owners of 28 of 32. "));
  auto other = fc(4, 4);
  other.kind.dtype = at::kDouble;
  CHECK_THAT(
      error_with({{fc(0, 4)}, {}, {other}}),
      ContainsText("to have one shape and dtype, got [8, 4] Float on rank 0 and [8, 4] Double on "
                   "rank 2 of 3"));
}

TEST_CASE("layouts and indices are the same after a text", "[checkpoint][pure]") {
  const std::string name = "a \"b\"\\\n/\x01 \xC3\xA4";
  ddp::RankLayouts layouts;
  layouts["model"] = {
      layout(name, {4, 3}, {{0, 1}, {4, 2}}), layout("scalar", {}, {}),
      layout("none", {0}, {{0}, {0}})};
  layouts["model"].front().replica = 2;
  layouts["empty"] = {};
  const auto again = ddp::layouts_from(ddp::to_text(layouts));
  CHECK(ddp::to_text(again) == ddp::to_text(layouts));
  REQUIRE(again.at("model").size() == 3);
  CHECK(again.at("model").front().name == name);
  CHECK(again.at("model").front().box.offset == std::vector<int64_t>{0, 1});
  CHECK(again.at("model").front().replica == 2);
  CHECK(again.count("empty") == 1);

  layouts["model"].front() = layout(name, {4, 3}, {{0, 0}, {4, 3}});
  layouts["model"].front().kind.dtype = at::kBFloat16;
  ddp::Manifest manifest;
  manifest.step = 12;
  manifest.library_version = "0.1.0";
  manifest.libtorch_version = "2.11.0";
  manifest.index["model"] = ddp::make_index("model", {{}, layouts["model"]});
  manifest.index["empty"] = {};
  const auto json = ddp::to_json(manifest);
  CHECK_THAT(json, ContainsText("\"format\": 2,"));
  CHECK_THAT(
      json, ContainsText("\"scalar\": {\"dtype\": \"float32\", \"sizes\": [], \"boxes\": "
                         "[[\"model.shard-00001.pt\", \"scalar/\", [], []]]}"));
  const auto parsed = ddp::parse_manifest(json, "m");
  CHECK(ddp::to_json(parsed) == json);
  CHECK(parsed.index.at("model").at(name).kind.dtype == at::kBFloat16);
  CHECK(parsed.index.at("model").at(name).boxes.front().box.size == std::vector<int64_t>{4, 3});
}

TEST_CASE("further names of a shared tensor are in the index", "[checkpoint][pure]") {
  auto first = layout("wte", {4}, {{0}, {2}}), second = layout("wte", {4}, {{2}, {2}});
  first.other_names = {"head.weight", "a \"b\""};
  second.other_names = {"head.weight", "decoder"};
  ddp::RankLayouts layouts;
  layouts["model"] = {first};
  const auto again = ddp::layouts_from(ddp::to_text(layouts));
  CHECK(again.at("model").front().other_names == first.other_names);
  ddp::Manifest manifest;
  manifest.index["model"] = ddp::make_index("model", {{first}, {second}});
  manifest.library_version = manifest.libtorch_version = "1";
  const std::vector<std::string> names{"head.weight", "a \"b\"", "decoder"};
  const auto json = ddp::to_json(manifest);
  CHECK_THAT(json, ContainsText(R"(], "other_names": ["head.weight", "a \"b\"", "decoder"]})"));
  CHECK(ddp::parse_manifest(json, "m").index.at("model").at("wte").other_names == names);
}

TEST_CASE("boxes of a manifest's index have each element once", "[checkpoint][errors][pure]") {
  const auto error_with = [](const std::vector<int64_t>& sizes,
                             const std::vector<TensorBox>& boxes) {
    ddp::Manifest manifest;
    manifest.library_version = manifest.libtorch_version = "1";
    auto& tensor = manifest.index["model"]["w"];
    tensor.kind.sizes = sizes;
    for (const auto& box : boxes) tensor.boxes.push_back({"model.shard-00000.pt", "w/0", box});
    const auto json = ddp::to_json(manifest);
    return error_of([&] { ddp::parse_manifest(json, "m"); });
  };
  CHECK(error_with({4, 2}, {{{0, 0}, {2, 2}}, {{2, 0}, {2, 2}}}).empty());
  CHECK(error_with({4, 2}, {{{2, 0}, {2, 2}}, {{0, 0}, {2, 2}}}).empty());
  CHECK(error_with({}, {{{}, {}}}).empty());
  CHECK(error_with({0, 2}, {}).empty());
  const std::string start = "m is damaged: its index: expected ";
  CHECK_THAT(
      error_with({4, 2}, {{{0, 0}, {2, 2}}, {{3, 0}, {1, 2}}}),
      ContainsText(start + "boxes of all elements of a tensor, got fewer"));
  CHECK_THAT(error_with({}, {}), ContainsText("got fewer"));
  CHECK_THAT(
      error_with({4, 2}, {{{0, 0}, {3, 2}}, {{2, 0}, {2, 2}}}),
      ContainsText(start + "each element in one box, got [2:3, 0:2] in two"));
  // As many elements as the tensor has, and one row in no box.
  CHECK_THAT(
      error_with({4, 2}, {{{1, 0}, {2, 2}}, {{0, 0}, {2, 2}}}),
      ContainsText("each element in one box, got [1:2, 0:2] in two"));
  CHECK_THAT(error_with({}, {{{}, {}}, {{}, {}}}), ContainsText("each element in one box"));
  for (const TensorBox& outside :
       {TensorBox{{0, 0}, {5, 2}}, TensorBox{{3, 0}, {2, 2}}, TensorBox{{-1, 0}, {4, 2}},
        TensorBox{{0, 0}, {-4, -2}}, TensorBox{{0, 0}, {INT64_MAX, 2}},
        TensorBox{{INT64_MAX, 0}, {4, 2}}, TensorBox{{0}, {4}}, TensorBox{{0, 0, 0}, {4, 2, 1}}}) {
    CAPTURE(ddp::box_text(outside));
    CHECK_THAT(
        error_with({4, 2}, {outside}), ContainsText(start + "boxes within their tensor's sizes"));
  }
}

TEST_CASE(
    "a manifest of format 1 is read, and written without sharded parts", "[checkpoint][pure]") {
  // Written by the library before it had sharded parts.
  const std::string json =
      "{\n  \"format\": 1,\n  \"step\": 3,\n  \"world_size\": 1,\n  \"ddp\": \"0.1.0\",\n"
      "  \"libtorch\": \"2.11.0\",\n  \"files\": [\n"
      "    {\"name\": \"model.pt\", \"bytes\": 176892, \"crc32c\": \"25bb00a1\"},\n"
      "    {\"name\": \"optimizer.pt\", \"bytes\": 345184, \"crc32c\": \"500a5c39\"},\n"
      "    {\"name\": \"scheduler.pt\", \"bytes\": 864, \"crc32c\": \"77c1f52e\"},\n"
      "    {\"name\": \"sampler.pt\", \"bytes\": 2972, \"crc32c\": \"a23f444e\"},\n"
      "    {\"name\": \"rank-0.pt\", \"bytes\": 6300, \"crc32c\": \"4dd96836\"}\n"
      "  ],\n  \"crc32c\": \"99fb8231\"\n}\n";
  const auto manifest = ddp::parse_manifest(json, "m");
  CHECK(manifest.step == 3);
  CHECK(manifest.index.empty());
  CHECK(manifest.files.size() == 5);
  CHECK(ddp::to_json(manifest) == json);
}
