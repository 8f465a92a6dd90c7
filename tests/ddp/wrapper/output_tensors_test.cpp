#include <array>
#include <list>
#include <map>

#include <ddp/output_tensors.h>
#include <torch/torch.h>

#include "support/catch.h"

namespace app {  // a user's own types

struct Output {
  at::Tensor logits;
  std::vector<at::Tensor> hidden;
  int unrelated = 0;
};
void visit_tensors(const Output& output, const ddp::TensorSink& sink) {
  sink(output.logits);
  ddp::for_each_tensor(output.hidden, sink);
}

struct Opaque {
  at::Tensor hidden_from_us;
};

}  // namespace app

namespace ddp {
namespace {

template <typename T>
std::pair<bool, int> count(const T& value) {
  int tensors = 0;
  const bool understood = for_each_tensor(value, [&](const at::Tensor&) { ++tensors; });
  return {understood, tensors};
}

using Counted = std::pair<bool, int>;

}  // namespace

TEST_CASE("tensors are found in any nesting", "[pure][ddp]") {
  const auto t = torch::ones({1});
  CHECK(count(t) == Counted(true, 1));
  CHECK(count(std::make_tuple(t, 3, t)) == Counted(true, 2));
  CHECK(count(std::make_pair(t, std::string("name"))) == Counted(true, 1));
  CHECK(count(std::vector<at::Tensor>{t, t, t}) == Counted(true, 3));
  CHECK(count(std::list<std::array<at::Tensor, 2>>{{t, t}, {t, t}}) == Counted(true, 4));
  CHECK(
      count(std::map<std::string, std::vector<at::Tensor>>{{"a", {t}}, {"b", {t, t}}}) ==
      Counted(true, 3));
  CHECK(count(std::optional<at::Tensor>()) == Counted(true, 0));
  CHECK(count(std::make_optional(std::make_tuple(t))) == Counted(true, 1));
  CHECK(count(std::make_shared<at::Tensor>(t)) == Counted(true, 1));
  CHECK(count(std::unique_ptr<at::Tensor>()) == Counted(true, 0));
  torch::OrderedDict<std::string, at::Tensor> dict;
  dict.insert("a", t);
  CHECK(count(dict) == Counted(true, 1));
  CHECK(count(c10::IValue(c10::List<at::Tensor>({t, t}))) == Counted(true, 2));
  CHECK(count(std::make_tuple()) == Counted(true, 0));
  // A function that is dereferenced is again the function.
  CHECK(count([](const at::Tensor& x) { return x; }).second == 0);
  at::Tensor (*const pointer)(const at::Tensor&) = torch::relu;
  CHECK(count(pointer).second == 0);
  CHECK(count(std::string("text")) == Counted(true, 0));
}

TEST_CASE("own types with visit_tensors are visited, others are reported", "[pure][ddp]") {
  const auto t = torch::ones({1});
  CHECK(count(app::Output{t, {t, t}}) == Counted(true, 3));
  CHECK(count(std::vector<app::Output>{{t, {}}, {t, {t}}}) == Counted(true, 3));
  CHECK(count(app::Opaque{t}) == Counted(false, 0));
  CHECK(count(std::make_tuple(t, app::Opaque{t})) == Counted(false, 1));
}

}  // namespace ddp
