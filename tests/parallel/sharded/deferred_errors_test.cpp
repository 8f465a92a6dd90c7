#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;
using torch::Tensor;

namespace {

/// The error of `use` under a guard, which gets a weight [30, 40].
template <typename Use>
std::string error_inside(const Use& use) {
  const ddp::DeferredInit guard;
  const torch::NoGradGuard no_grad;
  torch::nn::Linear linear(40, 30);
  return error_of([&] { use(linear->weight); });
}

/// The text if it lacks one of the parts.
std::string lacking(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) return text.empty() ? "no error" : text;
  }
  return "";
}

struct Refused {
  std::function<void(Tensor& weight)> use;
  std::vector<std::string> parts;  // of the error
};
const std::vector<std::string> kCured{
    "DeferredInit: expected", "[30, 40] Float", "ddp::materialize"};

void check_refused(const std::vector<Refused>& all) {
  for (const auto& [use, parts] : all) CHECK(lacking(error_inside(use), parts) == "");
}

}  // namespace

TEST_CASE("what needs a value under the guard says so", "[deferred][errors][once]") {
  check_refused(
      {{[](Tensor& w) { w.sum().item<float>(); },
        {"aten::_local_scalar_dense", "which needs its values", "ddp::materialize"}},
       {[](Tensor& w) { torch::equal(w, w); }, kCured},
       {[](Tensor& w) { torch::allclose(w, w); }, {"which needs its values"}},
       {[](Tensor& w) { w.nonzero(); }, {"aten::nonzero", "are known without values"}},
       {[](Tensor& w) { w.masked_select(w > 0); }, {"aten::masked_select"}},
       {[](Tensor& w) { w.data_ptr<float>(); }, kCured},
       {[](Tensor& w) { w.accessor<float, 2>(); }, kCured},
       {[](Tensor& w) { std::ostringstream() << w; }, {"DeferredInit"}}});
}

TEST_CASE("what cannot be recorded says so", "[deferred][errors][once]") {
  std::vector<float> own(1200);
  auto borrowed = torch::from_blob(own.data(), {30, 40});
  check_refused(
      {{[](Tensor& w) { w.resize_({2000}); },
        {"expected tensors of fixed sizes, got aten::resize_ of [30, 40] Float"}},
       {[](Tensor& w) {
          const torch::AutoGradMode with_grad(true);
          w.mul(2);
        },
        {"expected no graph, got aten::mul of [30, 40] Float", "NoGradGuard"}},
       {[](Tensor& w) { w.to_sparse(); }, {"build this module without the guard"}},
       {[](Tensor& w) { torch::randperm(w.size(0)); }, {"aten::randperm"}},
       {[&](Tensor& w) { borrowed.copy_(w); }, {"memory of the program's own", "clone()"}},
       {[](Tensor& w) {
          auto out = torch::empty({4});
          torch::add_out(out, w, w);
        },
        {"expected out= of [30, 40] Float for aten::add, got [4] Float"}}});
  CHECK(error_inside([](Tensor& w) { w.t_().mul_(2); }).empty());

  auto given = torch::ones({30, 40});
  torch::nn::Linear linear(nullptr);
  {
    const ddp::DeferredInit guard;
    linear = torch::nn::Linear(40, 30);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(given);
  }
  given.zero_();
  CHECK_THAT(
      error_of([&] { ddp::materialize(*linear); }), Contains("[30, 40] that was changed since"));
  CHECK(ddp::is_deferred(linear->weight));
}

TEST_CASE("an error in materialize() leaves the module deferred", "[deferred][errors][once]") {
  torch::nn::Linear linear(nullptr);
  {
    const ddp::DeferredInit guard;
    linear = torch::nn::Linear(40, 30);
    const torch::NoGradGuard no_grad;
    linear->weight.add_(torch::zeros({7, 7}));
  }
  CHECK_THAT(
      error_of([&] { ddp::materialize(*linear); }),
      Contains("DeferredInit: expected recorded operations to work, but aten::add_ threw: "));
  CHECK(ddp::is_deferred(linear->weight));
  CHECK(ddp::is_deferred(linear->bias));
}

TEST_CASE("a deferred module that is used says so", "[deferred][errors][once]") {
  torch::nn::Sequential net(nullptr);
  torch::nn::LSTM lstm(nullptr);
  torch::nn::Embedding tokens(nullptr);
  {
    const ddp::DeferredInit guard;
    net = torch::nn::Sequential(
        torch::nn::Linear(40, 30), torch::nn::LayerNorm(torch::nn::LayerNormOptions({30})));
    lstm = torch::nn::LSTM(40, 30);
    tokens = torch::nn::Embedding(40, 30);
  }
  const auto says_so = [](const std::string& error) {
    return lacking(error, {"DeferredInit: expected a tensor with values, got [", "materialize()"})
        .empty();
  };
  const auto x = torch::ones({2, 40});
  CHECK(says_so(error_of([&] { net->forward(x); })));
  CHECK(says_so(error_of([&] { lstm->forward(x.unsqueeze(0)); })));
  CHECK(says_so(error_of([&] { tokens->forward(torch::zeros({2}, torch::kLong)); })));
  CHECK(says_so(error_of([&] { torch::layer_norm(x, {40}, net->parameters()[0][0]); })));
  CHECK(says_so(error_of([&] { net->clone(); })));
  CHECK(says_so(error_of([&] { net->to(torch::kDouble); })));
  CHECK(says_so(error_of([&] { net->parameters()[0].sum(); })));
  CHECK(says_so(error_of([&] { net->parameters()[1].add(1); })));
  CHECK_FALSE(says_so(error_of([&] { net->parameters()[1].item(); })));
  std::ostringstream stream;
  CHECK(says_so(error_of([&] { torch::save(net, stream); })));
  CHECK(says_so(error_of([&] { std::ostringstream() << net->parameters()[1]; })));
  ddp::materialize(*net);
  CHECK(net->forward(x).size(1) == 30);
}

TEST_CASE("TensorParallelRng under the guard is an error", "[deferred][errors][ranks]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    const ddp::DeferredInit guard;
    const ddp::TensorParallelRng own(self.group);
  });
  CHECK_THAT(errors[0], Contains("TensorParallelRng: expected no DeferredInit guard around it"));
}
