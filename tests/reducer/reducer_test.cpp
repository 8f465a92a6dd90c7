#include <chrono>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "reducer/passes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

at::Tensor flat_gradients(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> flat;
  for (const auto& p : parameters) flat.push_back(p.tensor.grad().to(at::kDouble).flatten());
  return torch::cat(flat);
}

}  // namespace

TEST_CASE("every rank ends with the mean gradient", "[ranks][reducer][many]") {
  const int size = GENERATE(1, 2, 3);
  const bool as_views = GENERATE(false, true);
  const double cap_mb = GENERATE(1e-6, 1e-3, 25.0);
  CAPTURE(size, as_views, cap_mb);
  const auto gradients = run_ranks<at::Tensor>(size, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{
        {"a", parameter({5, 3})}, {"b", parameter({70})}, {"c", parameter({2, 2, 2})}};
    Reducer reducer(
        parameters, self.group,
        ReducerOptions().bucket_cap_mb(cap_mb).gradient_as_bucket_view(as_views));
    // Rank r contributes r + 1 times the step everywhere: small integers, exact sums.
    for (int step = 1; step <= 4; ++step) {
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        at::Tensor sum = torch::zeros({});
        for (const auto& p : parameters) sum = sum + p.tensor.sum();
        return sum * (step * (self.rank + 1.0) * size);
      });
    }
    return flat_gradients(parameters);
  });
  const auto expected = torch::full({93}, 4 * size * (size + 1) / 2.0, at::kDouble);
  // A third of an integer is rounded, three times.
  for (const auto& gradient : gradients) CHECK(torch::allclose(gradient, expected, 1e-6));
  if (size < 3) CHECK(torch::equal(gradients[0], expected));
}

TEST_CASE("over shared memory the cap changes no bit of the average", "[ranks][reducer]") {
  const auto options = testing::over("shm");
  const auto gradients = run_ranks<std::vector<at::Tensor>>(3, options, [](const Rank& self) {
    std::vector<at::Tensor> by_cap;
    for (const double cap_mb : {1e-6, 2e-3, 25.0}) {
      const std::vector<NamedParameter> parameters{
          {"a", parameter({500})}, {"b", parameter({700})}, {"c", parameter({31, 17})}};
      Reducer reducer(parameters, self.group, ReducerOptions().bucket_cap_mb(cap_mb));
      for (int step = 0; step < 3; ++step) {
        for (const auto& p : parameters) p.tensor.mutable_grad().reset();
        reduced_backward(reducer, [&] {
          at::Tensor sum = torch::zeros({});
          auto seed = at::make_generator<at::CPUGeneratorImpl>(self.rank);
          for (const auto& p : parameters) {
            sum = sum + (p.tensor * at::randn(p.tensor.sizes(), seed, at::kFloat)).sum();
          }
          return sum;
        });
      }
      by_cap.push_back(flat_gradients(parameters));
    }
    return by_cap;
  });
  for (const auto& by_cap : gradients) {
    for (const auto& gradient : by_cap) CHECK(torch::equal(gradient, gradients[0][0]));
  }
}

TEST_CASE("gradients keep their dtypes and layouts", "[ranks][reducer]") {
  const bool as_views = GENERATE(false, true);
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    const auto image = torch::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
    const std::vector<NamedParameter> parameters{
        {"float", parameter({3})},
        {"double", parameter({4}, at::kDouble)},
        {"complex", parameter({5}, at::kComplexFloat)},
        {"half", parameter({6}, at::kHalf)},
        {"image", image.detach().set_requires_grad(true)},
        {"empty", parameter({0})},
        {"gaps", torch::ones({6, 2}).slice(0, 0, 6, 2).detach().set_requires_grad(true)}};
    Reducer reducer(parameters, self.group, ReducerOptions().gradient_as_bucket_view(as_views));
    for (int step = 0; step < 3; ++step) {
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        at::Tensor sum = torch::zeros({}, at::kDouble);
        for (const auto& p : parameters) {
          const auto s = p.tensor.sum() * (2.0 * self.rank + 1);
          sum = sum + (s.is_complex() ? torch::real(s) : s).to(at::kDouble);
        }
        return sum;
      });
    }
    std::vector<at::Tensor> gradients;
    for (const auto& p : parameters) gradients.push_back(p.tensor.grad());
    return gradients;
  });
  for (const auto& gradients : results) {
    for (const auto& gradient : gradients) {
      CHECK(torch::equal(gradient, torch::full_like(gradient, 2.0)));
    }
    CHECK(gradients[1].scalar_type() == at::kDouble);
    CHECK(gradients[4].is_contiguous(at::MemoryFormat::ChannelsLast));
    CHECK(gradients[6].is_contiguous());
  }
}

TEST_CASE("sparse gradients are averaged sparsely", "[ranks][reducer]") {
  const auto gradients = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    const auto weight = torch::ones({10, 3}).set_requires_grad(true);
    const auto dense = parameter({4});
    Reducer reducer({{"dense", dense}, {"embedding", weight, true}}, self.group);
    at::Tensor gradient;
    for (int step = 0; step < 3; ++step) {
      weight.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        // Rank 0 looks up rows 1 and 2, rank 1 rows 2 and 3.
        const auto rows = torch::tensor({self.rank + 1, self.rank + 2}, at::kLong);
        return torch::embedding(weight, rows, -1, false, /*sparse=*/true).sum() + dense.sum();
      });
      gradient = weight.grad();
    }
    TORCH_CHECK(gradient.is_sparse());
    return gradient.to_dense().select(1, 0);
  });
  const auto expected = torch::tensor({0, 1, 2, 1, 0, 0, 0, 0, 0, 0}, at::kFloat) / 2;
  CHECK(torch::equal(gradients[0], expected));
  CHECK(torch::equal(gradients[1], expected));
}

TEST_CASE("gradients that are bucket views work with optimizers", "[ranks][reducer]") {
  const bool set_to_none = GENERATE(false, true);
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({4})}, {"b", parameter({4})}};
    Reducer reducer(parameters, self.group, ReducerOptions().gradient_as_bucket_view(true));
    torch::optim::SGD optimizer({parameters[0].tensor, parameters[1].tensor}, 0.5);
    int64_t between = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(set_to_none);  // detaches each gradient, which a real view would refuse
      reduced_backward(reducer, [&] {
        return (parameters[0].tensor.sum() + parameters[1].tensor.sum()) * (self.rank + 1);
      });
      optimizer.step();
      between = std::abs(
          parameters[0].tensor.grad().const_data_ptr<float>() -
          parameters[1].tensor.grad().const_data_ptr<float>());
    }
    return std::vector<at::Tensor>{
        parameters[0].tensor.detach(), torch::tensor(between, at::kLong)};
  });
  for (const auto& result : results) {
    CHECK(torch::equal(result[0], torch::full({4}, 1 - 4 * 0.5 * 1.5)));
    // Neighbours in one bucket: both gradients are views of its memory.
    CHECK(result[1].item<int64_t>() == 4);
  }
}

TEST_CASE("a rebuild keeps accumulated bucket views", "[ranks][reducer]") {
  const auto gradients = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({3})}, {"b", parameter({3})}};
    Reducer reducer(parameters, self.group, ReducerOptions().gradient_as_bucket_view(true));
    const auto loss = [&] { return parameters[0].tensor.sum() + 2 * parameters[1].tensor.sum(); };
    reduced_backward(reducer, loss);
    const c10::Storage old = parameters[0].tensor.grad().storage();
    reducer.prepare_for_forward();  // rebuilds
    TORCH_CHECK(reducer.has_rebuilt_buckets());
    // A backend's thread may release the tensors of a collective a moment after it is complete.
    for (int ms = 0; old.use_count() > 1 && ms < 5000; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    TORCH_CHECK(
        old.use_count() == 1, "the old buckets' memory is held ", old.use_count(), " times");
    const auto kept = flat_gradients(parameters);
    reduced_backward(reducer, loss);  // accumulates: reduces the sum of both
    return torch::stack({kept, flat_gradients(parameters)});
  });
  const auto once = torch::tensor({1, 1, 1, 2, 2, 2}, at::kDouble);
  CHECK(torch::equal(gradients[0], torch::stack({once, once * 2})));
}

TEST_CASE(
    "a parameter without a gradient is an error on every rank", "[ranks][errors][reducer][many]") {
  const bool as_views = GENERATE(false, true);
  const int size = GENERATE(1, 2, 3);
  const auto errors = run_ranks<std::vector<std::string>>(size, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{
        {"first.weight", parameter({4})}, {"second.weight", parameter({4})}};
    Reducer reducer(
        parameters, self.group,
        ReducerOptions().bucket_cap_mb(1e-6).gradient_as_bucket_view(as_views));
    std::vector<std::string> texts;
    // Before and after the rebuild, on the last rank only; a good pass after each bad one.
    for (int step = 0; step < 6; ++step) {
      const bool skip = step % 2 == 0 && self.rank == self.size - 1;
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
      try {
        reducer.prepare_for_forward();
        auto loss = parameters[1].tensor.sum() * (self.rank + 1.0) * self.size;
        if (!skip) loss = loss + parameters[0].tensor.sum();
        reducer.prepare_for_backward();  // without the outputs the error has no cause
        loss.backward();
        texts.push_back("");
        const auto expected = self.size * (self.size + 1) / 2.0;
        TORCH_CHECK(torch::allclose(parameters[1].tensor.grad(), torch::full({4}, expected), 1e-6));
      } catch (const c10::Error& error) {
        texts.push_back(error.what_without_backtrace());
      }
    }
    return texts;
  });
  const std::string expected = c10::str(
      "Reducer: backward ended without gradients for 1 of 2 parameters (first.weight) on rank ",
      size - 1, " of ", size,
      ". If a forward pass may skip parameters, set "
      "find_unused_parameters(true); if not, check that the loss uses every output."
      " The results of ddp::all_gather carry no gradient; those of ddp::functional::all_gather "
      "do.");
  for (const auto& texts : errors) {
    CHECK(texts == std::vector<std::string>{expected, "", expected, "", expected, ""});
  }
}

TEST_CASE(
    "find_unused_parameters averages used gradients and changes no others",
    "[ranks][reducer][many]") {
  const bool as_views = GENERATE(false, true);
  const bool hooked = GENERATE(false, true);
  const auto results = run_ranks<std::vector<at::Tensor>>(3, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{
        {"all", parameter({3})}, {"rank0", parameter({3})}, {"none", parameter({3})}};
    Reducer reducer(
        parameters, self.group,
        ReducerOptions().find_unused_parameters(true).gradient_as_bucket_view(as_views));
    if (hooked) reducer.register_comm_hook(hooks::all_reduce(self.group));
    const auto loss = [&](bool with_none) {
      auto sum = parameters[0].tensor.sum() * 3;
      if (self.rank == 0) sum = sum + parameters[1].tensor.sum() * 3;
      return with_none ? sum + parameters[2].tensor.sum() * 0.1 : sum;
    };
    reduced_backward(reducer, [&] { return loss(false); });
    TORCH_CHECK(!parameters[2].tensor.grad().defined());
    const auto second = parameters[1].tensor.grad().clone();

    reduced_backward(reducer, [&] { return loss(true); });
    const auto before = parameters[2].tensor.grad().clone();
    reduced_backward(reducer, [&] { return loss(false); });
    return std::vector<at::Tensor>{second, before, parameters[2].tensor.grad().clone()};
  });
  for (const auto& result : results) {
    CHECK(torch::equal(result[0], torch::ones({3})));
    // No rank used it in the last pass: not even a rounding error.
    CHECK(torch::equal(result[1], result[2]));
  }
}

TEST_CASE("a gradient of another dtype is an error on every rank", "[ranks][errors][reducer]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    const auto w = parameter({4});
    Reducer reducer({{"w", w}}, self.group);
    // Autograd accumulates into what is there.
    if (self.rank == 1) w.mutable_grad() = torch::zeros({4}, at::kDouble);
    reduced_backward(reducer, [&] { return w.sum(); });
  });
  CHECK_THAT(
      error, ContainsText("for 1 of 1 parameter (w: Double instead of Float) on rank 1 of 2"));
}

TEST_CASE("a gradient of another layout is an error on every rank", "[ranks][errors][reducer]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    const auto weight = torch::ones({10, 3}).set_requires_grad(true);
    Reducer reducer({{"embedding", weight}}, self.group);  // not declared as sparse
    reduced_backward(reducer, [&] {
      return torch::embedding(weight, torch::tensor({1, 2}), -1, false, self.rank == 1).sum();
    });
  });
  CHECK_THAT(error, ContainsText("(embedding: layout Sparse instead of Strided) on rank 1 of 2"));
}

namespace {

// The identity, whose backward makes no gradient where `drop` is true.
class MayDrop : public torch::autograd::Function<MayDrop> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& x, bool drop) {
    context->saved_data["drop"] = drop;
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    if (context->saved_data["drop"].toBool()) return {at::Tensor(), at::Tensor()};
    return {gradients[0], at::Tensor()};
  }
};

}  // namespace

TEST_CASE("a gradient of another shape is an error on every rank", "[ranks][errors][reducer]") {
  const bool as_views = GENERATE(false, true);
  const auto error = error_of_all(2, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({4})}, {"b", parameter({4})}};
    Reducer reducer(parameters, self.group, ReducerOptions().gradient_as_bucket_view(as_views));
    if (self.rank == 1) {
      // Replaced past autograd; the accumulator kept alive has the old shape.
      auto accumulator = torch::autograd::impl::grad_accumulator(parameters[0].tensor);
      parameters[0].tensor.mutable_grad() = torch::ones({8});
    }
    reduced_backward(reducer, [&] {
      return MayDrop::apply(parameters[0].tensor, self.rank == 1).sum() +
             parameters[1].tensor.sum();
    });
  });
  CHECK_THAT(
      error, ContainsText("for 1 of 2 parameters (a: shape [8] instead of [4]) on rank 1 of 2"));
}

TEST_CASE("gradients that no rank computed do not change, to the bit", "[ranks][reducer][many]") {
  const bool as_views = GENERATE(false, true);
  const int size = GENERATE(2, 3);
  const auto gradients = run_ranks<std::vector<at::Tensor>>(size, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({3})}, {"b", parameter({50})}};
    const auto weights = torch::linspace(0.1, 0.9, 50);  // inexact: a third of x, times 3, is not x
    Reducer reducer(
        parameters, self.group,
        ReducerOptions().gradient_as_bucket_view(as_views).find_unused_parameters(true));
    std::vector<at::Tensor> seen;
    for (int step = 0; step < 3; ++step) {
      reduced_backward(reducer, [&] {  // b gets a gradient in the first pass, and none later
        return parameters[0].tensor.sum() +
               (MayDrop::apply(parameters[1].tensor, step > 0) * weights).sum();
      });
      seen.push_back(parameters[1].tensor.grad().clone());
    }
    return seen;
  });
  for (const auto& seen : gradients) {
    CHECK(torch::equal(seen[1], seen[0]));
    CHECK(torch::equal(seen[2], seen[0]));
  }
}

TEST_CASE("sparse gradients may be unused on one rank, or on all", "[ranks][reducer]") {
  const auto gradients = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    const auto weight = torch::ones({4, 2}).set_requires_grad(true);
    const auto dense = parameter({3});
    Reducer reducer(
        {{"embedding", weight, true}, {"dense", dense}}, self.group,
        ReducerOptions().find_unused_parameters(true));
    std::vector<float> seen;
    for (const int users : {2, 1, 0}) {
      weight.mutable_grad().reset();
      reducer.prepare_for_forward();
      auto loss = dense.sum();
      if (self.rank < users) {
        loss = loss + torch::embedding(weight, torch::tensor({1}), -1, false, true).sum();
      }
      reducer.prepare_for_backward({{loss}, true});
      loss.backward();
      const auto& grad = weight.grad();
      seen.push_back(grad.defined() ? grad.to_dense()[1][0].item<float>() : -1);
    }
    return seen;
  });
  for (const auto& seen : gradients) CHECK(seen == std::vector<float>{1, 0.5, -1});
}

TEST_CASE("an undefined gradient counts as zeros", "[ranks][reducer]") {
  const bool as_views = GENERATE(false, true);
  const bool find_unused = GENERATE(false, true);
  const auto gradients = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    const std::vector<NamedParameter> parameters{{"a", parameter({3})}, {"b", parameter({3})}};
    Reducer reducer(
        parameters, self.group,
        ReducerOptions().gradient_as_bucket_view(as_views).find_unused_parameters(find_unused));
    std::vector<float> seen;
    for (int step = 0; step < 3; ++step) {
      for (const auto& p : parameters) p.tensor.mutable_grad().reset();
      reduced_backward(reducer, [&] {
        const bool drop = self.rank == 1 && step != 1;
        return parameters[0].tensor.sum() + MayDrop::apply(parameters[1].tensor, drop).sum();
      });
      for (const auto& p : parameters) seen.push_back(p.tensor.grad()[0].item<float>());
    }
    return seen;
  });
  for (const auto& seen : gradients) CHECK(seen == std::vector<float>{1, 0.5, 1, 1, 1, 0.5});
}

TEST_CASE("unusable parameters are refused by name", "[ranks][errors][reducer]") {
  const auto error_of = [](const std::vector<NamedParameter>& parameters) {
    return errors_of_ranks(1, [&](const Rank& self) { Reducer(parameters, self.group); })[0];
  };
  CHECK_THAT(error_of({}), ContainsText("at least one parameter"));
  CHECK_THAT(error_of({{"w", at::Tensor()}}), ContainsText("\"w\", which is undefined"));
  CHECK_THAT(error_of({{"w", torch::ones({2})}}), ContainsText("require a gradient, got \"w\""));
}

TEST_CASE("gradients equal c10d::Reducer's", "[ranks][reducer][many]") {
  const int size = GENERATE(1, 2, 3);
  const bool as_views = GENERATE(false, true);
  CAPTURE(size, as_views);
  const auto pairs = run_ranks<std::vector<at::Tensor>>(size, [&](const Rank& self) {
    const auto train = [&](bool ours) {
      torch::nn::Sequential net(
          torch::nn::Linear(6, 20), torch::nn::Tanh(), torch::nn::Linear(20, 4));
      auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
      const torch::NoGradGuard no_grad;
      std::vector<NamedParameter> parameters;
      std::vector<at::Tensor> tensors;
      for (const auto& p : net->named_parameters()) {
        p.value().uniform_(-0.5, 0.5, generator);
        parameters.push_back({p.key(), p.value()});
        tensors.push_back(p.value());
      }
      auto data = at::make_generator<at::CPUGeneratorImpl>(100 + self.rank);
      const torch::AutoGradMode grad(true);

      std::unique_ptr<Reducer> mine;
      std::unique_ptr<c10d::Reducer> theirs;
      if (ours) {
        mine = std::make_unique<Reducer>(
            parameters, self.group, ReducerOptions().gradient_as_bucket_view(as_views));
      } else {
        const auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
            tensors, {size_t{1} << 20}, std::vector<bool>(tensors.size(), false), {});
        theirs = std::make_unique<c10d::Reducer>(
            tensors, buckets, self.group, std::vector<bool>(tensors.size(), false),
            int64_t{25} << 20, false, as_views, std::unordered_map<size_t, std::string>(),
            int64_t{1} << 20, false, false, std::vector<int64_t>());
      }
      torch::optim::SGD optimizer(tensors, 0.1);
      for (int step = 0; step < 5; ++step) {
        // As torch::optim's zero_grad, which refuses c10d's views.
        for (const auto& t : tensors) t.mutable_grad().reset();
        if (ours) mine->prepare_for_forward();
        if (!ours) {
          theirs->prepare_for_forward();
          theirs->rebuild_buckets();
        }
        const auto x = torch::randn({5, 6}, data);
        const auto loss = net->forward(x).pow(2).mean();
        if (ours) mine->prepare_for_backward();
        if (!ours) theirs->prepare_for_backward({});
        loss.backward();
        optimizer.step();
      }
      std::vector<at::Tensor> flat;
      for (const auto& t : tensors) flat.push_back(t.grad().flatten());
      for (const auto& t : tensors) flat.push_back(t.detach().flatten());
      return torch::cat(flat);
    };
    return std::vector<at::Tensor>{train(true), train(false)};
  });
  for (const auto& pair : pairs) {
    if (size < 3) {
      CHECK(torch::equal(pair[0], pair[1]));
    } else {
      // Sums of three may be added in another order.
      CHECK(torch::allclose(pair[0], pair[1], 1e-5, 1e-7));
    }
  }
}

}  // namespace ddp
