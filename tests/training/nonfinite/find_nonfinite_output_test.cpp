// Which operator of a forward pass made its result infinite or NaN.
#include <ddp/find_nonfinite_output.h>

#include <functional>
#include <limits>
#include <vector>

#include <ATen/Context.h>
#include <torch/torch.h>

#include "support/catch.h"

namespace ddp {
namespace {

constexpr auto kInfiniteInput = std::numeric_limits<double>::infinity();

torch::nn::Sequential two_layers() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
}

}  // namespace

TEST_CASE("a finite forward pass names no operator", "[nonfinite]") {
  auto net = two_layers();
  CHECK(find_nonfinite_output(*net, [&] { return net->forward(torch::ones({3, 4})); }).empty());
}

TEST_CASE("the operator whose finite inputs gave no finite result is named", "[nonfinite]") {
  auto net = two_layers();
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[2].fill_(std::numeric_limits<float>::max());
    net->parameters()[0].fill_(1);
  }
  const auto text = find_nonfinite_output(*net, [&] {
    return net->forward(torch::ones({3, 4})).exp().sum() * 2;
  });
  CHECK_THAT(text, ContainsText("aten::addmm of \"2.bias\", \"2.weight\""));
  CHECK_THAT(text, ContainsText("the first result that is not finite, [3, 2]"));
}

TEST_CASE("an operator in place, without parameters, is named by its number", "[nonfinite]") {
  torch::nn::Linear net(2, 2);
  const auto text = find_nonfinite_output(*net, [&] {
    auto x = torch::zeros({2, 2});
    x.log_();
    return net->forward(x);
  });
  CHECK_THAT(text, ContainsText("aten::log_:") && ContainsText("operator 2 of the pass"));
}

TEST_CASE("of nested operators the one that the program called is named, too", "[nonfinite]") {
  torch::nn::Conv1d net(torch::nn::Conv1dOptions(1, 1, 1));
  {
    const torch::NoGradGuard no_grad;
    net->weight.fill_(std::numeric_limits<float>::max());
  }
  const auto text = find_nonfinite_output(*net, [&] {
    return net->forward(torch::full({1, 1, 4}, 3.0));
  });
  CHECK_THAT(text, ContainsText("aten::conv1d (aten::"));
  CHECK_THAT(text, ContainsText("of \"weight\", \"bias\": the first result"));
}

TEST_CASE("infinite values that do not reach the result are not named", "[nonfinite]") {
  torch::nn::Linear net(4, 4);
  const auto attention = [&](double scale) {
    auto scores = net->forward(torch::ones({4, 4}));
    scores = scores.masked_fill(torch::ones({4, 4}, torch::kBool).triu(1), -kInfiniteInput);
    return (scores.softmax(-1) - 1.5) * scale;
  };
  CHECK(find_nonfinite_output(*net, [&] { return attention(1); }).empty());
  const auto text = find_nonfinite_output(*net, [&] { return attention(1).log(); });
  CHECK_THAT(text, ContainsText("aten::log:"));
}

TEST_CASE("a finite view of memory hides nothing of the rest", "[nonfinite]") {
  torch::nn::Linear net(2, 2);
  const auto text = find_nonfinite_output(*net, [&] {
    const auto finite = net->forward(torch::ones({2, 2}));
    const auto both = torch::stack({(finite - finite).log(), finite});
    const auto view = both[1];
    return both.sum() + view.sum();
  });
  CHECK_THAT(text, ContainsText("aten::log:"));
}

TEST_CASE("values that were replaced are not named", "[nonfinite]") {
  torch::nn::Linear net(2, 2);
  const auto text = find_nonfinite_output(*net, [&] {
    auto x = torch::zeros({2, 2});
    x.log_().fill_(1);
    return x.sub_(1).reciprocal_().sum() + net->forward(torch::ones({2, 2})).sum();
  });
  CHECK_THAT(text, ContainsText("aten::reciprocal_:"));
}

TEST_CASE("values of one byte are looked at", "[nonfinite]") {
  torch::nn::Linear net(2, 2);
  const auto scaled_by = [&](double factor) {
    return find_nonfinite_output(*net, [&] {
      const auto x = torch::full({2, 2}, factor).to(at::kFloat8_e4m3fn);
      const auto y = net->forward(torch::ones({2, 2}));
      return ((y - y) * x.to(at::kFloat)).exp();
    });
  };
  CHECK(scaled_by(2).empty());
  CHECK_THAT(scaled_by(kInfiniteInput), ContainsText("aten::full"));
}

TEST_CASE("memory that nobody has written to is named where it is read", "[nonfinite]") {
  torch::nn::Linear net(2, 2);
  struct Deterministic {  // fills such memory with NaN
    Deterministic() { at::globalContext().setDeterministicAlgorithms(true, false); }
    ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
  } const deterministic;
  const auto large = torch::full({2, 2}, std::numeric_limits<float>::max());
  const auto text_of = [&](const std::function<void(at::Tensor&)>& write) {
    return find_nonfinite_output(*net, [&] {
      const torch::NoGradGuard no_grad;
      auto x = torch::empty({2, 2});
      write(x);
      return x + net->forward(torch::ones({2, 2}));
    });
  };
  CHECK_THAT(text_of([](at::Tensor&) {}), ContainsText("aten::empty"));
  CHECK_THAT(text_of([](at::Tensor& x) { x[0].fill_(1); }), ContainsText("aten::empty"));
  CHECK_THAT(
      text_of([&](at::Tensor& x) { at::mm_out(x, large, large); }), ContainsText("aten::mm"));
  CHECK_THAT(text_of([&](at::Tensor& x) { x.copy_(large * 2); }), ContainsText("aten::mul"));
  CHECK_THAT(text_of([](at::Tensor& x) { x.zero_().log_(); }), ContainsText("aten::log_:"));
  CHECK_THAT(
      text_of([&](at::Tensor& x) { at::mm_out(x.zero_().log_(), large, large); }),
      ContainsText("aten::mm"));
  CHECK(text_of([](at::Tensor& x) { x[0].fill_(1), x[1].fill_(2); }).empty());
  // Nested in another operator.
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
  const auto text = find_nonfinite_output(*conv, [&] {
    return conv->forward(torch::full({1, 3, 8, 8}, std::numeric_limits<float>::max())).pow(2);
  });
  CHECK_THAT(text, !ContainsText("empty"));
}

TEST_CASE("a parameter or an argument that is not finite is named itself", "[nonfinite]") {
  auto net = two_layers();
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[3].fill_(kInfiniteInput);
  }
  const auto forward = [&](const at::Tensor& x) {
    return find_nonfinite_output(*net, [&] {
      return std::vector<at::Tensor>{torch::ones({1}), net->forward(x)};
    });
  };
  CHECK_THAT(forward(torch::ones({3, 4})), ContainsText("\"2.bias\" [2] is not finite itself"));
  torch::NoGradGuard no_grad;
  net->parameters()[3].fill_(0);
  torch::nn::BatchNorm1d norm(4);
  norm->running_mean[0] = kInfiniteInput;
  norm->eval();
  CHECK_THAT(
      find_nonfinite_output(
          *norm,
          [&] {
            return norm->forward(torch::ones({3, 4}));
          }),
      ContainsText("\"running_mean\" [4] is not finite itself"));
  CHECK_THAT(
      forward(torch::full({5, 4}, kInfiniteInput)),
      ContainsText("a tensor [5, 4] that no operator of the pass made"));
}

}  // namespace ddp
