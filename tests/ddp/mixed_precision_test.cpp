// MixedPrecision: the dtypes of a forward pass, and that parameters have their own dtype at any
// other time. mixed_precision.py compares the results with Python.
#include <atomic>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/text.h>
#include <torch/torch.h>

#include "ddp/precision/low_precision_parameters.h"
#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp::mixed_precision {  // a unity build joins the tests' files
namespace {

using namespace testing;

DistributedDataParallelOptions low(const Rank& self) {
  return in(self).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16));
}

/// Saves weights for backward (conv), views of them (linear), and uses one twice.
struct NetImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) {
    TORCH_CHECK(!throws, "thrown on purpose");
    seen = {
        x.scalar_type(), conv->weight.scalar_type(), fc->weight.scalar_type(), frozen.scalar_type(),
        ignored.scalar_type()};
    x = torch::relu(conv(x.view({-1, 1, 4, 4}))).flatten(1) * frozen;
    x = fc(fc(x));
    return checkpoints ? checkpoint(block, x) : block->forward(x);
  }

  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 2, 3).padding(1)))};
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(32, 32))};
  torch::nn::Sequential block{register_module(
      "block", torch::nn::Sequential(
                   torch::nn::Linear(32, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3)))};
  at::Tensor frozen = register_parameter("frozen", torch::full({32}, 0.7), false);
  at::Tensor ignored = register_parameter("ignored", torch::ones({2}));
  at::Tensor table = register_buffer("table", torch::ones({2}));
  at::Tensor counter = register_buffer("counter", torch::zeros({}, torch::kLong));
  std::vector<at::ScalarType> seen;
  bool throws = false;
  bool checkpoints = false;
};
TORCH_MODULE(Net);

Net make_net() {
  Net net;
  set_waves(*net, {0.37, 1, 1, 0.3});
  return net;
}

at::Tensor input(const Rank& self, int step) {
  return torch::sin(torch::arange(6 * 16, torch::kFloat) * (0.1 + 0.3 * self.rank) + step)
      .view({6, 16});
}

bool is_itself(Net& net) {
  for (const auto& p : net->parameters()) {
    if (p.scalar_type() != torch::kFloat || !p.is_leaf() || p.grad_fn()) return false;
  }
  return true;
}

/// The parameters after a few steps. One step accumulates, and all run a forward without backward.
std::vector<at::Tensor> train(
    const Rank& self, const DistributedDataParallelOptions& options, bool checkpoints = false) {
  auto net = make_net();
  net->checkpoints = checkpoints;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions(options).parameters_to_ignore({"ignored"}));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    if (step == 2) {
      const auto guard = model->no_sync();
      model->forward(input(self, 9)).to(torch::kFloat).square().mean().backward();
    }
    const auto output = model->forward(input(self, step));
    TORCH_CHECK(is_itself(net), "after forward");
    (void)model->forward(input(self, 7));  // without backward
    output.to(torch::kFloat).square().mean().backward();
    TORCH_CHECK(is_itself(net), "after backward");
    optimizer.step();
  }
  return net->parameters();
}

/// The same by hand: copies of the parameters and averages in bfloat16.
std::vector<at::Tensor> train_by_hand(const Rank& self) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto low = make_net();
  low->to(torch::kBFloat16);
  const auto masters = net->parameters();
  const auto copies = low->parameters();
  for (int step = 0; step < 5; ++step) {
    std::vector<at::Tensor> sums(masters.size());
    const auto add_gradients_of = [&](int data) {
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < masters.size(); ++i) copies[i].copy_(masters[i]);
      }
      low->zero_grad();
      const auto x = input(self, data).to(torch::kBFloat16);
      low->forward(x).to(torch::kFloat).square().mean().backward();
      for (size_t i = 0; i < masters.size(); ++i) {
        if (!copies[i].grad().defined()) continue;
        const auto gradient = copies[i].grad().to(torch::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
      }
    };
    if (step == 2) add_gradients_of(9);
    add_gradients_of(step);
    for (size_t i = 0; i < masters.size(); ++i) {
      if (!sums[i].defined()) continue;
      auto wire = sums[i].to(torch::kBFloat16).div_(self.size);
      all_reduce(wire, c10d::ReduceOp::SUM, self.group);
      masters[i].mutable_grad() = wire.to(torch::kFloat);
    }
    optimizer.step();
  }
  return masters;
}

}  // namespace

TEST_CASE("mixed precision equals copies in bfloat16 with float32 masters", "[ranks][ddp][long]") {
  const int size = GENERATE(1, 2, 3);
  const int variant = GENERATE(0, 1, 2, 3);
  CAPTURE(size, variant);
  const auto results = run_ranks<std::vector<std::vector<at::Tensor>>>(
      size, [variant](const Rank& self) -> std::vector<std::vector<at::Tensor>> {
        auto options = low(self).bucket_cap_mb(0.001);
        if (variant == 1) options.gradient_as_bucket_view(true);
        if (variant == 2) options.find_unused_parameters(true);
        const bool checkpoints = variant == 3;
        return {train(self, options, checkpoints), train_by_hand(self)};
      });
  for (const auto& result : results) {
    CHECK(all_equal(result[0], results[0][0]));
    // A sum of three in bfloat16 depends on the order, which depends on the size of the message.
    if (size < 3) CHECK(all_equal(result[0], result[1]));
    CHECK(all_close(result[0], result[1], 1e-2, 1e-2));
  }
}

TEST_CASE(
    "mixed precision: parameters, buffers and outputs have the dtypes of the options",
    "[ranks][ddp]") {
  const auto results = run_ranks<std::string>(2, [](const Rank& self) -> std::string {
    auto net = make_net();
    DistributedDataParallel model(
        net, in(self)
                 .parameters_to_ignore({"ignored"})
                 .mixed_precision(MixedPrecision()
                                      .param_dtype(torch::kBFloat16)
                                      .reduce_dtype(torch::kFloat)
                                      .buffer_dtype(torch::kBFloat16)));
    const auto output = model->forward(input(self, 0));
    output.sum().backward();
    std::vector<at::ScalarType> seen = net->seen;
    seen.push_back(output.scalar_type());
    seen.push_back(net->fc->weight.grad().scalar_type());
    seen.push_back(net->table.scalar_type());
    seen.push_back(net->counter.scalar_type());
    return c10::str(c10::Join(" ", seen));
  });
  CHECK(results[1] == "BFloat16 BFloat16 BFloat16 BFloat16 Float BFloat16 Float BFloat16 Long");
}

TEST_CASE(
    "mixed precision: parameters are restored after every way a pass can end", "[ranks][ddp]") {
  const auto results = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    auto net = make_net();
    DistributedDataParallel model(net, low(self).find_unused_parameters(true));
    const auto before = net->fc->weight.clone();
    const auto check = [&](const char* when) {
      TORCH_CHECK(is_itself(net) && torch::equal(before, net->fc->weight), when);
    };
    {
      const torch::NoGradGuard no_grad;
      TORCH_CHECK(model->forward(input(self, 0)).scalar_type() == torch::kBFloat16);
    }
    check("evaluation");
    {
      const c10::InferenceMode inference;
      (void)model->forward(input(self, 0));
    }
    check("inference");
    net->throws = true;
    try {
      (void)model->forward(input(self, 0));
      return "forward did not throw";
    } catch (const c10::Error&) {
    }
    check("an exception in forward");
    net->throws = false;
    auto output = model->forward(input(self, 0));
    output.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "thrown on purpose"); });
    try {
      output.sum().backward();
      return "backward did not throw";
    } catch (const c10::Error&) {
    }
    check("an exception in backward");
    return "";
  });
  CHECK(results[0].empty());
}

TEST_CASE(
    "mixed precision works for graphs that share parameters, and a retained one", "[ranks][ddp]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(1, [](const Rank& self) {
    std::vector<at::Tensor> gradients;
    const auto run = [&](const auto& backward) {
      auto net = make_net();
      DistributedDataParallel model(
          net, low(self).find_unused_parameters(true).mixed_precision(
                   MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat)));
      const auto a = model->forward(input(self, 0)).to(torch::kFloat).sum();
      const auto b = model->forward(input(self, 1)).to(torch::kFloat).square().sum();
      backward(a, b);
      TORCH_CHECK(is_itself(net));
      gradients.push_back(net->conv->weight.grad());
    };
    run([](const at::Tensor& a, const at::Tensor& b) { (a + b).backward(); });
    run([](const at::Tensor& a, const at::Tensor& b) {
      a.backward();
      b.backward();
    });
    run([](const at::Tensor& a, const at::Tensor& b) {
      b.backward({}, /*retain_graph=*/true);
      b.backward();
      a.backward();
    });
    return gradients;
  });
  const auto& [together, after_another, kept] =
      std::tie(results[0][0], results[0][1], results[0][2]);
  CHECK(torch::allclose(together, after_another, 1e-2, 1e-3));
  CHECK_FALSE(torch::allclose(together, kept, 1e-2, 1e-3));
}

TEST_CASE("mixed precision works for layers that hold weights in their own way", "[ranks][ddp]") {
  const auto results = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 4).num_layers(2));
    DistributedDataParallel recurrent(lstm, low(self));
    std::get<0>(recurrent->forward(torch::ones({3, 2, 5}))).sum().backward();

    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(7, 4));
    DistributedDataParallel table(embedding, low(self));
    table->forward(torch::tensor({{1, 2}, {2, 3}})).sum().backward();
    const auto& gradient = embedding->weight.grad();
    return ddp::str(
        lstm->all_weights()[0].grad().scalar_type(), " ", gradient.scalar_type(), " ",
        gradient.sum().item<double>());
  });
  CHECK(results[0] == "Float Float 16");
}

TEST_CASE("mixed precision works with step_in_backward and a GradScaler", "[ranks][ddp]") {
  const auto results = run_ranks<std::vector<std::vector<at::Tensor>>>(2, [](const Rank& self) {
    const auto run = [&](int way) {
      auto net = make_net();
      DistributedDataParallel model(net, low(self).parameters_to_ignore({"ignored"}));
      auto optimizer = std::make_shared<torch::optim::SGD>(net->parameters(), 0.05);
      GradScaler scaler(GradScalerOptions().init_scale(256).enabled(way == 2));
      if (way == 1) model->step_in_backward(optimizer);
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        scaler.scale(model->forward(input(self, step)).to(torch::kFloat).sum()).backward();
        if (way == 0) optimizer->step();
        if (way == 2) scaler.step(*optimizer);
        if (way == 2) scaler.update();
      }
      return net->parameters();
    };
    return std::vector<std::vector<at::Tensor>>{run(0), run(1), run(2)};
  });
  CHECK(all_equal(results[0][0], results[0][1]));
  CHECK(all_equal(results[0][0], results[0][2]));
}

TEST_CASE("mixed precision throws for what it does not support", "[ranks][ddp][errors]") {
  const auto refused = [](const std::function<void(const Rank&)>& body) {
    return errors_of_ranks(1, body).front();
  };
  const auto with = [](const Rank& self, const MixedPrecision& precision) {
    return in(self).mixed_precision(precision);
  };
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel(
            make_net(), with(self, MixedPrecision().param_dtype(torch::kDouble)));
      }),
      ContainsText(
          "MixedPrecision: expected param_dtype to be Half, BFloat16 or Float, got Double"));
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel(
            torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 4).sparse(true)), low(self));
      }),
      ContainsText("expected dense gradients, got those of \"weight\""));
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel(make_net(), low(self).reduction(Reduction::Sum));
      }),
      ContainsText("reduction(Reduction::Mean)") && ContainsText("reduce_dtype(torch::kFloat)"));
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel model(make_net(), low(self));
        model->register_comm_hook(hooks::noop());
      }),
      ContainsText("register_comm_hook: expected gradients that are reduced as they are"));
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel model(make_net(), low(self));
        ZeroRedundancyOptimizer<torch::optim::SGD> zero(
            model, torch::optim::SGDOptions(0.1), ZeroOptions().stage(2));
      }),
      ContainsText("stage 2") && ContainsText("parameters BFloat16, reduction BFloat16"));
  CHECK_THAT(
      refused([&](const Rank& self) {
        DistributedDataParallel model(make_net(), low(self));
        const auto loss = model->forward(input(self, 0)).square().sum();
        torch::autograd::grad(
            {loss}, {model->module()->fc->weight}, {}, /*retain_graph=*/{}, /*create_graph=*/true);
      }),
      ContainsText("expected a backward pass without create_graph"));
  for (const auto& error : errors_of_ranks(2, [](const Rank& self) {
         const auto dtype = self.rank == 0 ? torch::kBFloat16 : torch::kHalf;
         DistributedDataParallel(
             make_net(), in(self).mixed_precision(MixedPrecision().param_dtype(dtype)));
       })) {
    CHECK_THAT(
        error, ContainsText("mixed_precision") && ContainsText("BFloat16") && ContainsText("Half"));
  }
}

namespace {

/// y = a x + b. Both parameters have the same gradient, so the same values between steps.
struct TwinsImpl : torch::nn::Cloneable<TwinsImpl> {
  TwinsImpl() { reset(); }
  void reset() override {
    a = register_parameter("a", torch::zeros({1000}));
    b = register_parameter("b", torch::zeros({1000}));
    table = register_buffer("table", torch::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (in_forward) in_forward();
    const auto product = a * x;
    if (in_backward) {
      product.register_hook(
          [act = std::exchange(in_backward, nullptr)](const at::Tensor&) { act(); });
    }
    return product + b;
  }

  at::Tensor a, b, table;
  std::function<void()> in_forward;
  std::function<void()> in_backward;  // runs in the backward pass of the next forward pass
};
TORCH_MODULE(Twins);

using TwinsModel = DistributedDataParallel<Twins>;

/// What is wrong with values that have to be of one moment; "" where nothing is.
std::string fault_of(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != torch::kFloat || b.scalar_type() != torch::kFloat) return "a cast";
  return torch::equal(a, b) && torch::equal(a, a[0].expand_as(a)) ? "" : "of two steps";
}

/// Trains while another thread calls `look` so many times; returns the first fault that it found.
std::string look_while_training(
    const Rank& self, int looks, const std::function<std::string(TwinsModel&, int)>& look) {
  Twins net;
  TwinsModel model(net, low(self));
  torch::optim::SGD optimizer(model->parameters(), 1.0 / 64);
  const auto step = [&] {
    optimizer.zero_grad();
    model->forward(torch::ones({1000})).to(torch::kFloat).sum().backward();
    optimizer.step();
  };
  step();
  std::string fault;
  std::atomic<bool> is_done{false};
  std::thread other([&] {
    try {
      for (int i = 0; i < looks && fault.empty(); ++i) fault = look(model, i);
    } catch (const std::exception& e) {
      fault = e.what();
    }
    is_done = true;
  });
  // Both ranks have to run the same number of steps.
  for (bool all_done = false; !all_done;) {
    step();
    auto left = torch::full({1}, is_done ? 0 : 1);
    all_reduce(left, c10d::ReduceOp::MAX, self.group);
    all_done = left.item<int64_t>() == 0;
  }
  other.join();
  return fault;
}

}  // namespace

TEST_CASE(
    "a file that another thread saves holds values of one moment", "[ranks][mixed_precision]") {
  const TemporaryFolder folder;
  const auto faults = run_ranks<std::string>(2, [&](const Rank& self) {
    const auto file = folder.path() + "/" + std::to_string(self.rank);
    Twins loaded;
    return look_while_training(self, 100, [&](TwinsModel& model, int i) {
      if (i % 2 == 0) {
        std::stringstream stream;
        torch::save(model, stream);
        torch::load(loaded, stream);
      } else {
        save_state_dict(*model, file);
        load_state_dict(*loaded, file);
      }
      return fault_of(loaded->a, loaded->b);
    });
  });
  for (const auto& fault : faults) CHECK(fault.empty());
}

TEST_CASE(
    "a file that another thread begins before the first pass holds no casts",
    "[ranks][mixed_precision]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) {
    Twins net;
    TwinsModel model(net, low(self));
    torch::serialize::OutputArchive archive;
    std::thread([&] { model->save(archive); }).join();
    std::stringstream stream;
    net->in_forward = [&] { archive.save_to(stream); };
    model->forward(torch::ones({1000}));
    Twins loaded;
    torch::load(loaded, stream);
    return fault_of(loaded->a, loaded->b);
  });
  CHECK(faults[0] == "");
}

TEST_CASE("another thread can compute with a snapshot", "[ranks][mixed_precision]") {
  const auto faults = run_ranks<std::string>(2, [](const Rank& self) {
    std::optional<Twins> copy;
    const auto x = torch::ones({1000});
    return look_while_training(self, 100, [&](TwinsModel& model, int i) {
      if (i % 10 == 0) {
        copy = model->snapshot();
      } else {
        model->update_snapshot(**copy);
      }
      const torch::NoGradGuard no_grad;
      const auto y = (*copy)->forward(x);
      return fault_of((*copy)->a, (*copy)->b) + fault_of(y, 2 * (*copy)->a);
    });
  });
  for (const auto& fault : faults) CHECK(fault.empty());
}

TEST_CASE("a snapshot is a copy, and update_snapshot renews it", "[ranks][mixed_precision]") {
  const bool is_low = GENERATE(true, false);
  const auto error = errors_of_ranks(1, [&](const Rank& self) {
    Twins net;
    TwinsModel model(net, is_low ? low(self) : in(self));
    // In a pass of this thread the parameters are the casts.
    Twins of_pass(nullptr);
    net->in_forward = [&] { of_pass = model->snapshot(); };
    (void)model->forward(torch::ones({1000}));
    TORCH_CHECK(fault_of(of_pass->a, of_pass->b).empty(), fault_of(of_pass->a, of_pass->b));
    auto copy = model->snapshot();
    {
      const torch::NoGradGuard no_grad;
      net->a.fill_(7);
      net->table.fill_(8);
    }
    TORCH_CHECK(copy->a.sum().item<float>() == 0 && copy->a.requires_grad(), "shares memory");
    model->update_snapshot(*copy);
    TORCH_CHECK(torch::equal(copy->a, net->a) && torch::equal(copy->table, net->table), "is old");
    torch::nn::Linear other(2, 2);
    model->update_snapshot(*other);
  })[0];
  CHECK_THAT(error, ContainsText("update_snapshot: expected a copy of the wrapped module"));
}

TEST_CASE("a forward pass on another thread is an error", "[ranks][errors][mixed_precision]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    Twins net;
    TwinsModel model(net, low(self));
    std::string in_forward, in_backward;
    const auto elsewhere = [&](std::string& error) {
      net->in_forward = nullptr;
      std::thread([&] {
        const torch::NoGradGuard no_grad;
        error = error_of([&] { model->forward(torch::ones({1000})); });
      }).join();
    };
    net->in_forward = [&] { elsewhere(in_forward); };
    net->in_backward = [&] { elsewhere(in_backward); };
    const auto y = model->forward(torch::ones({1000}));
    y.to(torch::kFloat).sum().backward();
    TORCH_CHECK(torch::equal(net->a.grad(), torch::ones({1000})), "the pass was disturbed");
    TORCH_CHECK(in_forward == in_backward, in_backward);
    TORCH_CHECK(false, in_forward);
  });
  CHECK_THAT(errors[0], ContainsText("MixedPrecision: expected forward on one thread"));
}

TEST_CASE(
    "a forward pass of another thread between passes is an error",
    "[ranks][errors][mixed_precision]") {
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    Twins net;
    TwinsModel model(net, low(self));
    const auto x = torch::ones({1000});
    const auto train = [&] { model->forward(x).to(torch::kFloat).sum().backward(); };
    train();
    // While an optimizer might step.
    std::atomic<bool> is_called{false}, has_ended{false};
    std::string error;
    std::thread other([&] {
      const torch::NoGradGuard no_grad;
      is_called = true;
      error = error_of([&] { model->forward(x); });
      has_ended = true;
    });
    while (!is_called) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    TORCH_CHECK(net->a.scalar_type() == torch::kFloat, "is a cast");
    // Until the other thread, which may be late, has come between two of these.
    while (!has_ended) train();
    other.join();
    // And after a pause, as a program may evaluate once its training thread has ended.
    std::thread([&] { train(); }).join();
    TORCH_CHECK(false, error);
  });
  CHECK_THAT(errors[0], ContainsText("MixedPrecision: expected forward on one thread"));
}

TEST_CASE("a slow step is not read in its middle", "[ranks][mixed_precision]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) {
    Twins net;
    TwinsModel model(net, low(self));
    const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    std::thread reader;
    std::string fault;
    net->in_backward = [&] {
      reader = std::thread([&] {
        sleep(250);
        const auto copy = model->snapshot();
        fault = fault_of(copy->a, copy->b);
      });
      sleep(600);
    };
    model->forward(torch::ones({1000})).to(torch::kFloat).sum().backward();
    // As LibTorch's SGD writes, past the version counters.
    net->a.data().add_(1);
    sleep(200);
    net->b.data().add_(1);
    reader.join();
    return fault;
  });
  CHECK(faults[0] == "");
}

TEST_CASE("casts of many tensors are those of one, and gradients come back", "[precision][pure]") {
  const std::vector<at::Tensor> tensors{
      torch::linspace(-3, 3, 12).view({3, 4}).requires_grad_(),
      torch::rand({2, 3, 4, 4}, at::kDouble).contiguous(at::MemoryFormat::ChannelsLast),
      torch::rand({4, 5}).t().requires_grad_(), torch::zeros({0}).requires_grad_()};
  const auto casts = cast_all(tensors, at::kBFloat16);
  REQUIRE(casts.size() == tensors.size());
  for (size_t i = 0; i < casts.size(); ++i) {
    CAPTURE(i);
    const auto& t = tensors[i];
    CHECK(casts[i].scalar_type() == at::kBFloat16);
    CHECK(torch::equal(casts[i], t.to(at::kBFloat16)));
    CHECK(casts[i].strides() == t.to(at::kBFloat16).strides());
    CHECK(casts[i].requires_grad() == t.requires_grad());
    if (!t.requires_grad()) continue;
    casts[i].mul(3).sum().backward();
    CHECK(torch::equal(t.grad(), torch::full_like(t, 3)));
  }
  const torch::NoGradGuard no_grad;
  CHECK_FALSE(cast_all(tensors, at::kHalf)[0].requires_grad());
  CHECK(cast_all({}, at::kHalf).empty());
}

}  // namespace ddp::mixed_precision
