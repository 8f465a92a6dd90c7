// Parameters in flat memory: each rank changes its shard, and gathers the others.
#include <ddp/internal/flat_parameters.h>

#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <c10/util/accumulate.h>
#include <ddp/parameter_layout.h>

#include "shard/box_elements.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;

/// Parameters of different shapes and strides, one of them without elements.
Tensors make_parameters() {
  Tensors parameters;
  int64_t first = 1;
  const std::vector<std::vector<int64_t>> shapes{{2, 3, 4, 5}, {7}, {0, 3}, {}, {5, 9}};
  for (const auto& sizes : shapes) {
    const auto numel = c10::multiply_integers(sizes);
    auto p = at::arange(first, first + numel, at::kFloat).reshape(sizes);
    if (sizes.size() == 4) p = p.contiguous(at::MemoryFormat::ChannelsLast);
    parameters.push_back(p.requires_grad_());
    first += numel;
  }
  return parameters;
}

bool have_values(const FlatParameters& flat, const Tensors& values, double more = 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!at::equal(flat.parameters()[i].detach(), values[i].detach() + more)) return false;
  }
  return true;
}

/// By check: whether it held.
using Held = std::vector<char>;
Held all_held(const Held& one) { return Held(one.size(), 1); }

}  // namespace

TEST_CASE("parameters in flat memory keep their values and strides", "[shard][ranks]") {
  const int world = GENERATE(1, 2, 3);
  const auto held = run_ranks<Held>(world, [](const Rank& self) {
    const auto before = make_parameters();
    const FlatParameters flat(self.group, make_parameters());
    Held held{have_values(flat, before)};
    for (size_t i = 0; i < before.size(); ++i) {
      const auto& p = flat.parameters()[i];
      held.push_back(p.strides() == before[i].strides() && p.requires_grad() && p.is_leaf());
      held.push_back(p.numel() == 0 || p.const_data_ptr() == flat.views()[i].const_data_ptr());
    }
    return held;
  });
  for (const auto& of_rank : held) CHECK(of_rank == all_held(of_rank));
}

TEST_CASE("a gather brings what other ranks wrote into their shards", "[shard][ranks]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  const auto held = run_ranks<Held>(world, [&](const Rank& self) {
    FlatParameters flat(self.group, make_parameters());
    const auto values = copies_of(flat.parameters());
    Held held;
    for (int step = 1; step <= 3; ++step) {
      flat.shard().add_(1);
      flat.gather_async()->wait();
      held.push_back(have_values(flat, values, step));
    }
    return held;
  });
  for (const auto& of_rank : held) CHECK(of_rank == all_held(of_rank));
}

TEST_CASE("layouts say where every element of a shard is", "[shard][ranks]") {
  const int world = GENERATE(1, 2, 3);
  const auto make = [] {
    Tensors parameters;
    for (const auto& p : make_parameters()) parameters.push_back(p.detach().contiguous());
    return parameters;
  };
  const auto layouts = run_ranks<std::vector<ParameterLayout>>(world, [&](const Rank& self) {
    const FlatParameters flat(self.group, make());
    std::vector<ParameterLayout> own;
    for (const auto& piece : flat.layout().pieces(self.rank)) {
      const auto sizes = flat.parameters()[piece.slot].sizes().vec();
      const TensorBox whole{std::vector<int64_t>(sizes.size()), sizes};
      own.push_back(
          {std::to_string(piece.slot),
           sizes,
           at::kFloat,
           flat.shard().narrow(0, piece.at, piece.numel).clone(),
           boxes_of(whole, piece.from, piece.from + piece.numel),
           {},
           {}});
    }
    return own;
  });
  auto found = make();
  for (const auto& p : found) p.fill_(-1);
  for (const auto& of_rank : layouts) {
    for (const auto& layout : of_rank) {
      int64_t at = 0;
      for (const auto& box : layout.boxes) {
        for (const auto element : elements_of(box, layout.sizes)) {
          found[std::stoul(layout.name)].view({-1})[element] = layout.local[at++];
        }
      }
      CHECK(at == layout.local.numel());
    }
  }
  const auto expected = make();
  for (size_t i = 0; i < expected.size(); ++i) CHECK(at::equal(found[i], expected[i]));
}

}  // namespace ddp
