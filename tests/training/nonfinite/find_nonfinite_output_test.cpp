// Which operator of a forward pass made its result infinite or NaN.
#include <ddp/find_nonfinite_output.h>

#include <limits>
#include <vector>

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
  CHECK_THAT(
      forward(torch::full({5, 4}, kInfiniteInput)),
      ContainsText("a tensor [5, 4] that no operator of the pass made"));
}

}  // namespace ddp
