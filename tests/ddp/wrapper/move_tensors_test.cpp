#include <ddp/move_tensors.h>
#include <torch/torch.h>

#include "support/catch.h"

namespace photos {

struct Batch {
  at::Tensor images;
  std::string name;
};

Batch move_tensors(const Batch& batch, const ddp::TensorMove& to) {
  return {to(batch.images), batch.name};
}

}  // namespace photos

namespace ddp {
namespace {

// The meta device exists in every build; its tensors have shapes and no content.
const c10::Device kElsewhere(at::kMeta);

template <typename T>
T moved(const T& value) {
  static_assert(detail::can_move<T>);
  return detail::InputPlacement{kElsewhere, {}}.placed(value);
}

}  // namespace

TEST_CASE("tensors are moved in any nesting, and nothing else changes", "[pure][ddp]") {
  using Tensors = std::vector<at::Tensor>;
  const auto t = torch::ones({2});
  CHECK(moved(t).is_meta());
  CHECK_FALSE(moved(at::Tensor()).defined());
  CHECK(moved(Tensors{t, t})[1].is_meta());
  CHECK(moved(std::optional<at::Tensor>(t))->is_meta());
  CHECK_FALSE(moved(std::optional<at::Tensor>()).has_value());
  CHECK(moved(std::array<at::Tensor, 2>{t, t})[1].is_meta());

  const auto [number, tensors] = moved(std::pair<int, Tensors>(7, {t}));
  CHECK(number == 7);
  CHECK(tensors[0].is_meta());
  const auto tuple = moved(std::tuple<std::string, at::Tensor, double>("mask", t, 0.5));
  CHECK(std::get<0>(tuple) == "mask");
  CHECK(std::get<1>(tuple).is_meta());
  CHECK(std::get<2>(tuple) == 0.5);
  const auto map = moved(
      std::map<std::string, std::vector<std::pair<at::Tensor, bool>>>{{"hidden", {{t, true}}}});
  CHECK(map.at("hidden")[0].first.is_meta());
  CHECK(map.at("hidden")[0].second);
  CHECK(moved(std::unordered_map<int, at::Tensor>{{3, t}}).at(3).is_meta());
  CHECK(t.is_cpu());
}

TEST_CASE("tensors in values of TorchScript are moved", "[pure][ddp]") {
  const auto t = torch::ones({2});
  CHECK(moved(c10::IValue(t)).toTensor().is_meta());
  CHECK_FALSE(moved(c10::IValue(at::Tensor())).toTensor().defined());
  CHECK(moved(c10::IValue()).isNone());
  CHECK(moved(c10::IValue(7)).toInt() == 7);
  CHECK(moved(c10::IValue(std::vector<at::Tensor>{t})).toTensorVector()[0].is_meta());
  const auto tuple = moved(c10::IValue(std::make_tuple(t, std::string("mask"))));
  CHECK(tuple.toTupleRef().elements()[0].toTensor().is_meta());
  CHECK(tuple.toTupleRef().elements()[1].toStringRef() == "mask");
  c10::Dict<std::string, std::vector<at::Tensor>> layers;
  layers.insert("hidden", std::vector<at::Tensor>{t, t});
  const auto dict = moved(c10::IValue(layers)).toGenericDict();
  CHECK(dict.at("hidden").toTensorVector()[1].is_meta());
  CHECK(layers.at("hidden")[1].is_cpu());
}

TEST_CASE("a type with move_tensors is moved, also inside of others", "[pure][ddp]") {
  const photos::Batch batch{torch::ones({2}), "beach"};
  CHECK(moved(batch).images.is_meta());
  CHECK(moved(batch).name == "beach");
  CHECK(moved(std::vector<photos::Batch>{batch, batch})[1].images.is_meta());
  CHECK_FALSE(moved(photos::Batch()).images.defined());
}

TEST_CASE("types without tensors are not moved", "[pure][ddp]") {
  CHECK_FALSE(detail::can_move<int>);
  CHECK_FALSE(detail::can_move<std::vector<double>>);
  CHECK_FALSE(detail::can_move<std::tuple<int, std::string>>);
}

}  // namespace ddp
