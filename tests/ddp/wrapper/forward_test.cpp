// Modules with all kinds of signatures and results.
#include <atomic>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

struct PairResult {
  at::Tensor sum;
  std::string note;
};

class OddImpl : public torch::nn::Module {
 public:
  OddImpl() { w_ = register_parameter("w", torch::ones({2})); }

  PairResult forward(const at::Tensor& x, int times, std::string note) {
    return {(x * w_).sum() * times, std::move(note)};
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& a, const at::Tensor& b) {
    return {(a * w_).sum(), (b * w_).sum()};
  }
  std::unique_ptr<at::Tensor> forward(std::unique_ptr<at::Tensor> x) {
    *x = *x * w_;
    return x;
  }
  void forward(at::Tensor& in_place) { in_place = in_place * w_; }
  at::Tensor& forward() { return w_; }

 private:
  at::Tensor w_;
};
TORCH_MODULE(Odd);

}  // namespace

TEST_CASE("forward has the signatures and results of the module's forward", "[ranks][ddp]") {
  const auto results = run_ranks<std::string>(2, [](const Rank& self) {
    Odd odd;
    DistributedDataParallel model(odd, in(self));
    static_assert(std::is_same_v<decltype(model), DistributedDataParallel<Odd>>);
    static_assert(std::is_same_v<decltype(model->forward()), at::Tensor&>);
    static_assert(std::is_same_v<decltype(model->forward(std::declval<at::Tensor&>())), void>);
    static_assert(std::is_same_v<decltype(model->module()), Odd&>);

    const auto x = torch::ones({2});
    const auto pair = model->forward(x, 3, "moved");
    TORCH_CHECK(pair.sum.item<float>() == 6 && pair.note == "moved");
    const auto [a, b] = model->forward(x, x * 2);
    TORCH_CHECK(a.item<float>() == 2 && b.item<float>() == 4);
    const auto moved = model->forward(std::make_unique<at::Tensor>(x * 5));
    TORCH_CHECK(moved->sum().item<float>() == 10);
    auto y = x.clone();
    model->forward(y);
    TORCH_CHECK(y.requires_grad());
    TORCH_CHECK(&model->forward() == &odd->forward());
    TORCH_CHECK(model(x, 1, "called").note == "called");
    // A backward pass after all these forwards is reduced once.
    (y.sum() * (self.rank + 1)).backward();
    return c10::str(odd->parameters()[0].grad());
  });
  CHECK(results[0] == results[1]);
  CHECK_THAT(results[0], ContainsText("1.5"));
}

TEST_CASE("holders, pointers and sequences can be wrapped", "[ranks][ddp]") {
  run_ranks<int>(2, [](const Rank& self) {
    const auto x = torch::ones({1, 3});
    torch::nn::Linear linear(3, 2);
    DistributedDataParallel held(linear, in(self));
    TORCH_CHECK(torch::equal(held->forward(x), linear->forward(x)));
    DistributedDataParallel pointed(linear.ptr(), in(self));
    TORCH_CHECK(torch::equal(pointed(x), linear->forward(x)));
    torch::nn::Sequential sequence(torch::nn::Linear(3, 2), torch::nn::ReLU());
    DistributedDataParallel sequential(sequence, in(self));
    TORCH_CHECK(torch::equal(sequential->forward(x), sequence->forward(x)));
    sequential->forward(x).sum().backward();
    TORCH_CHECK(sequence->parameters()[0].grad().defined());
    return 0;
  });
}

TEST_CASE("the wrapper is a module like any other", "[ranks][ddp]") {
  run_ranks<int>(1, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::Dropout());
    DistributedDataParallel model(net, in(self));
    std::vector<std::string> names;
    for (const auto& p : model->named_parameters()) names.push_back(p.key());
    TORCH_CHECK((names == std::vector<std::string>{"module.0.weight", "module.0.bias"}));
    model->eval();
    TORCH_CHECK(!net->is_training());
    model->train();
    TORCH_CHECK(net->is_training());
    TORCH_CHECK(model->parameters()[0].is_same(net->parameters()[0]));
    DistributedDataParallel<torch::nn::Sequential> same = model;  // holders share the module
    TORCH_CHECK(same.get() == model.get());
    return 0;
  });
}

TEST_CASE("a profiler records forward", "[ranks][ddp][profile]") {
  static std::atomic<int> seen;
  seen = 0;
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& range) -> std::unique_ptr<at::ObserverContext> {
        seen += std::string(range.name()) == "DistributedDataParallel.forward";
        return nullptr;
      }));
  run_ranks<int>(2, [](const Rank& self) {
    Odd odd;
    DistributedDataParallel model(odd, in(self));
    for (int i = 0; i < 3; ++i) model->forward(torch::ones({2}), 1, "").sum.backward();
    return 0;
  });
  at::removeCallback(handle);
  CHECK(seen == 6);
}

namespace {

struct Overloaded : torch::nn::Module {
  Overloaded() { w = register_parameter("w", torch::ones({1})); }
  template <typename T>
  at::Tensor forward(T factor) {
    return w * factor;
  }
  at::Tensor forward(int a, int b) { return w * (a + b); }
  at::Tensor w;
};
struct Final final : torch::nn::Module {
  Final() { w = register_parameter("w", torch::ones({1})); }
  at::Tensor forward(double factor) { return w * factor; }
  at::Tensor w;
};

}  // namespace

TEST_CASE("a module with any kind of forward can be wrapped", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<double>>(1, [](const Rank& self) {
    DistributedDataParallel overloaded(std::make_shared<Overloaded>(), in(self));
    DistributedDataParallel closed(std::make_shared<Final>(), in(self));
    return std::vector<double>{
        overloaded->forward(2).item<double>(), overloaded->forward(1, 2).item<double>(),
        closed->forward(4).item<double>()};
  });
  CHECK(seen[0] == std::vector<double>{2, 3, 4});
}

}  // namespace ddp
