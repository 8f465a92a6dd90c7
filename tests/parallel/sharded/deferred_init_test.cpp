#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/deferred_modules.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

struct Named {
  const char* name;
  Build build;
};

const std::vector<Named> kModules{
    {"Linear", [] { return of(torch::nn::Linear(20, 30)); }},
    {"Linear without outputs", [] { return of(torch::nn::Linear(3, 0)); }},
    {"Conv2d", [] { return of(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).groups(2))); }},
    {"ConvTranspose1d",
     [] { return of(torch::nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(4, 6, 3))); }},
    {"LayerNorm", [] { return of(torch::nn::LayerNorm(torch::nn::LayerNormOptions({40}))); }},
    {"BatchNorm2d", [] { return of(torch::nn::BatchNorm2d(2000)); }},
    {"GroupNorm", [] { return of(torch::nn::GroupNorm(2, 10)); }},
    {"MultiheadAttention", [] { return of(torch::nn::MultiheadAttention(32, 4)); }},
    {"MultiheadAttention with other sizes",
     [] {
       return of(torch::nn::MultiheadAttention(
           torch::nn::MultiheadAttentionOptions(32, 4).kdim(8).vdim(12).add_bias_kv(true)));
     }},
    {"Embedding", [] { return of(torch::nn::Embedding(100, 16)); }},
    {"Embedding with padding",
     [] { return of(torch::nn::Embedding(torch::nn::EmbeddingOptions(100, 16).padding_idx(3))); }},
    {"LSTM", [] { return of(torch::nn::LSTM(torch::nn::LSTMOptions(9, 33).num_layers(2))); }},
    {"transformer layer",
     [] {
       return of(torch::nn::TransformerEncoderLayer(
           torch::nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64)));
     }},
    {"double",
     [] {
       auto net = torch::nn::Linear(20, 30);
       net->to(torch::kDouble);
       return of(net);
     }},
    {"constants", made([](Made& m) {
       m.register_buffer("full", torch::full({3, 4}, 2.5));
       m.register_buffer("ones", torch::ones({5}, torch::kLong));
       m.register_buffer("arange", torch::arange(7));
       m.register_buffer("positions", torch::arange(0, 20, torch::kFloat).unsqueeze(1));
       m.register_buffer("mask", torch::ones({6, 6}).triu(1).to(torch::kBool));
       m.register_buffer("steps", torch::linspace(0, 1, 11));
       m.register_buffer("list", torch::tensor({0.485, 0.456, 0.406}).view({1, 3, 1, 1}));
       m.register_buffer("vector", torch::tensor(std::vector<double>{1, 2, 3}).mul(2));
       m.register_buffer("number", torch::tensor(7));
       m.register_buffer("eye", torch::eye(4));
       m.register_buffer("triangle", torch::tril_indices(3, 3));
     })},
    {"out of place", made([](Made& m) {
       const auto w = torch::randn({8, 8});
       m.register_parameter("scaled", (w * 0.02).t().contiguous());
       m.register_parameter("part", torch::cat({w.narrow(0, 2, 3), torch::zeros({1, 8})}));
       m.register_parameter("sum", w.sum(0));
       m.register_buffer("view", w.select(0, 1));
       m.register_buffer("sorted", std::get<0>(w.sort()));
     })},
    {"init functions", made([](Made& m) {
       const auto add = [&](const char* name, std::vector<int64_t> sizes) {
         return m.register_parameter(name, torch::empty(sizes));
       };
       torch::nn::init::orthogonal_(add("orthogonal", {6, 4}));
       torch::nn::init::orthogonal_(add("orthogonal_wide", {4, 6}));
       torch::nn::init::dirac_(add("dirac", {3, 3, 5}));
       torch::nn::init::eye_(add("eye", {4, 4}));
       torch::nn::init::xavier_normal_(add("xavier", {4, 40}));
       torch::nn::init::kaiming_normal_(add("kaiming", {40, 4}));
       torch::nn::init::constant_(add("constant", {1000, 4}), 0.1);
     })},
    {"out= without elements", made([](Made& m) {
       const torch::NoGradGuard no_grad;
       const auto w = torch::randn({30, 40});
       const auto add = [&](const char* name, at::Tensor out, const auto& fill) {
         fill(out);
         m.register_buffer(name, out);
         m.register_buffer(name + std::string("_plus"), out + 1);
       };
       add("sum", torch::empty({0}), [&](at::Tensor& out) { torch::add_out(out, w, w); });
       add("none", torch::empty({0}),
           [&](at::Tensor& out) { torch::mul_out(out, w.narrow(0, 0, 0), w.narrow(0, 0, 0)); });
       add("product", torch::zeros({0, 7}),
           [&](at::Tensor& out) { torch::matmul_out(out, w, w.t()); });
       add("part", w.narrow(0, 3, 0).clone(), [&](at::Tensor& out) {
         torch::cat_out(out, {w, torch::ones({2, 40})});
       });
       add("twice", torch::empty({0}), [&](at::Tensor& out) {
         torch::sum_out(out, w, 0);
         torch::mul_out(out, out, out);
       });
       add("full", torch::empty({30, 40}), [&](at::Tensor& out) { torch::sub_out(out, w, w); });
     })},
    {"index and mask", made([](Made& m) {
       const torch::NoGradGuard no_grad;
       auto w = m.register_parameter("w", torch::randn({10, 4}));
       w[3].fill_(0);
       w.index_put_({torch::indexing::Slice(0, 2), 1}, 5);
       w.masked_fill_(w > 1, 1);
       w.mul_(torch::rand({4})).clamp_(-1, 1);
     })},
    {"numbers that nothing keeps", made([](Made& m) {
       m.register_parameter("a", torch::randn({30}));
       torch::randn({17});
       m.register_parameter("b", torch::rand({2000}));
       torch::rand({2000}).normal_();
     })},
    {"seed inside", made([](Made& m) {
       m.register_parameter("a", torch::randn({30}));
       torch::manual_seed(5);
       m.register_parameter("b", torch::randn({30}));
       m.register_parameter("c", torch::randn({2000}));
     })},
    {"generator of its own", made([](Made& m) {
       const auto own = at::make_generator<at::CPUGeneratorImpl>(9);
       m.register_parameter("a", torch::empty({30}).normal_(0, 1, own));
       m.register_parameter("b", torch::empty({30}).normal_());
       m.register_parameter("c", torch::empty({2000}).uniform_(0, 1, own));
     })},
    {"ordinary tensors",
     [] {
       const auto given = torch::randn({3000});
       return made([given](Made& m) {
         m.register_buffer("given", given);
         m.register_buffer("copy", torch::empty({3000}).copy_(given));
         m.register_buffer("noise", torch::randn_like(given));
         m.register_buffer("own", given.clone().normal_());
       })();
     }},
};

}  // namespace

TEST_CASE("a deferred module has an ordinary one's values and generator", "[deferred][once]") {
  for (const auto& [name, build] : kModules) {
    CAPTURE(name);
    torch::manual_seed(1);
    const auto expected = build();
    const auto state = generator_state();
    torch::manual_seed(1);
    const auto module = build_deferred(build);
    ddp::materialize(*module);
    CHECK(equal_modules(*module, *expected));
    CHECK(torch::equal(generator_state(), state));
    for (const auto& tensor : tensors_of(*module)) CHECK_FALSE(ddp::is_deferred(tensor));
    ddp::materialize(*module);
    CHECK(torch::equal(generator_state(), state));
  }
}

TEST_CASE("layers of LibTorch are deferred whole", "[deferred][once]") {
  for (const auto& [name, build] : kModules) {
    if (std::string(name) == "constants") break;
    CAPTURE(name);
    const auto module = build_deferred(build);
    CHECK(all_deferred(*module));
    CHECK(module->parameters().size() == build()->parameters().size());
  }
}

TEST_CASE("a module that is never materialized, and one that goes on", "[deferred][once]") {
  torch::manual_seed(2);
  const torch::nn::Linear first(30, 40), second(40, 50);
  const auto state = generator_state();
  for (const bool reversed : {false, true}) {
    torch::manual_seed(2);
    torch::nn::Linear a(nullptr), b(nullptr);
    {
      const ddp::DeferredInit guard;
      a = torch::nn::Linear(30, 40);
    }
    {
      const ddp::DeferredInit outer, inner;
      b = torch::nn::Linear(40, 50);
    }
    ddp::materialize(reversed ? *b : *a);
    ddp::materialize(reversed ? *a : *b);
    CHECK(equal_modules(*a, *first));
    CHECK(equal_modules(*b, *second));
    CHECK(torch::equal(generator_state(), state));
  }
  build_deferred([] { return of(torch::nn::Linear(3000, 3000)); });
  const auto after = build_deferred([] { return of(torch::nn::Linear(3, 3)); });
  CHECK(all_deferred(*after));
}

TEST_CASE("numbers drawn between the guard and materialize()", "[deferred][once]") {
  torch::manual_seed(3);
  const torch::nn::Linear expected(30, 40);
  torch::manual_seed(3);
  const auto module = build_deferred([] { return of(torch::nn::Linear(30, 40)); });
  torch::manual_seed(4);
  torch::randn({5});
  const auto state = generator_state();
  ddp::materialize(*module);
  CHECK(equal_modules(*module, *expected));
  CHECK(torch::equal(generator_state(), state));
}

TEST_CASE("the same seed before two guards gives the same values", "[deferred]") {
  const auto build = [](bool seeds_again) {
    std::vector<torch::nn::Linear> layers;
    torch::manual_seed(9);
    for (int i = 0; i < 2; ++i) {
      if (seeds_again) torch::manual_seed(9);
      const ddp::DeferredInit guard;
      layers.emplace_back(torch::nn::Linear(3, 3));
    }
    for (auto& layer : layers) ddp::materialize(*layer);
    return at::equal(layers[0]->weight, layers[1]->weight);
  };
  CHECK(build(true));
  CHECK_FALSE(build(false));
}
