// torch::save and torch::load of a wrapped model, or of a part of it.
#include <sstream>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// Two layers, and a third that only some forwards use.
class LayersImpl : public torch::nn::Module {
 public:
  LayersImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    second = register_module("second", torch::nn::Linear(4, 2));
    spare = register_module("spare", torch::nn::Linear(4, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = norm->forward(first->forward(x));
    return uses_spare ? second->forward(hidden) + spare->forward(hidden) : second->forward(hidden);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, spare{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  bool uses_spare = true;
};
TORCH_MODULE(Layers);

// A module whose child has the name that the wrapper gives to the wrapped module.
class NestedImpl : public torch::nn::Module {
 public:
  NestedImpl() { module = register_module("module", torch::nn::Linear(2, 2)); }
  at::Tensor forward(const at::Tensor& x) { return module->forward(x); }
  torch::nn::Linear module{nullptr};
};
TORCH_MODULE(Nested);

template <typename Module>
std::string saved(const Module& module) {
  std::ostringstream out;
  torch::save(module, out);
  return out.str();
}

template <typename Module>
void load(Module& module, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(module, in);
}

// Fixed weights: the ranks are threads, and share torch's random generator.
Layers layers(double scale) {
  Layers net;
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.copy_(torch::linspace(-1, scale, p.numel()).view_as(p));
  return net;
}

std::string other_model() { return saved(layers(1)); }

void copy_values(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  for (const auto& p : from.named_parameters()) to.named_parameters()[p.key()].copy_(p.value());
  for (const auto& b : from.named_buffers()) to.named_buffers()[b.key()].copy_(b.value());
}

enum class Loads { Nothing, Whole, Wrapper, Child };

// The gradients and parameters of each step.
std::vector<at::Tensor> train(
    const Rank& self, const DistributedDataParallelOptions& options, Loads what, int at_step,
    const std::string& bytes, bool reference) {
  auto net = layers(0.5);
  net->uses_spare = !options.static_graph();
  DistributedDataParallel model(net, options);
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 5; ++step) {
    if (step == at_step) {
      Layers other;
      load(other, bytes);
      if (reference) {
        what == Loads::Child ? copy_values(*other->second, *net->second)
                             : copy_values(*other, *net);
      } else if (what == Loads::Whole) {
        load(net, bytes);
      } else if (what == Loads::Wrapper) {
        load(model, bytes);
      } else if (what == Loads::Child) {
        load(net->second, saved(other->second));
      }
    }
    if (options.find_unused_parameters()) net->uses_spare = step % 2 == 0;
    model->zero_grad();
    const auto x = torch::arange(12, at::kFloat).view({4, 3}) * (self.rank + 1 + 0.1 * step);
    model->forward(x).pow(2).mean().backward();
    const torch::NoGradGuard no_grad;
    for (auto& p : net->parameters()) {
      if (!p.grad().defined()) continue;
      seen.push_back(p.grad().clone());
      p -= 0.01 * p.grad();
    }
  }
  for (const auto& p : net->parameters()) seen.push_back(p.detach());
  return seen;
}

}  // namespace

TEST_CASE("torch::load into a wrapped model equals copying the values", "[ranks][ddp][long]") {
  const auto what = GENERATE(Loads::Whole, Loads::Wrapper, Loads::Child);
  const int at_step = GENERATE(0, 2);
  const std::string mode = GENERATE("plain", "views", "static_graph", "find_unused");
  CAPTURE(static_cast<int>(what), at_step, mode);
  const auto bytes = other_model();
  const auto results = run_ranks<int>(2, [&](const Rank& self) {
    const auto options = in(self)
                             .bucket_cap_mb(1e-5)
                             .gradient_as_bucket_view(mode == "views")
                             .static_graph(mode == "static_graph")
                             .find_unused_parameters(mode == "find_unused");
    const auto loaded = train(self, options, what, at_step, bytes, false);
    const auto copied = train(self, options, what, at_step, bytes, true);
    const auto untouched = train(self, options, Loads::Nothing, -1, bytes, false);
    return !all_equal(loaded, copied) ? 1 : all_equal(loaded, untouched) ? 2 : 0;
  });
  CHECK(results == std::vector<int>{0, 0});
}

TEST_CASE("replicas stay equal after each rank loaded the file", "[ranks][ddp]") {
  const auto bytes = other_model();
  const auto seen = run_ranks<std::vector<at::Tensor>>(
      2, [&](const Rank& self) { return train(self, in(self), Loads::Whole, 2, bytes, false); });
  CHECK(all_equal(seen[0], seen[1]));
}

TEST_CASE("a model that was converted to double and back can be trained", "[ranks][ddp]") {
  const auto sums = run_ranks<double>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self));
    for (int step = 0; step < 3; ++step) {
      net->to(at::kDouble);
      net->to(at::kFloat);
      net->zero_grad();
      model->forward(torch::full({1, 1}, self.rank + 1.0f)).sum().backward();
    }
    return net->weight.grad().item<double>();
  });
  CHECK(sums == std::vector<double>{1.5, 1.5});
}

TEST_CASE("gradients accumulated under no_sync after torch::load are sent", "[ranks][ddp]") {
  const auto sums = run_ranks<double>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self).find_unused_parameters(true));
    const auto x = torch::full({1, 1}, self.rank + 1.0f);
    model->forward(x).sum().backward();
    net->zero_grad();
    load(net, saved(net));
    {
      const auto guard = model->no_sync();
      model->forward(x).sum().backward();
    }
    // This pass does not use the weight; it is sent because the pass under no_sync used it.
    (model->forward(x) * 0 + torch::ones({1, 1}).set_requires_grad(true)).sum().backward();
    return net->weight.grad().item<double>();
  });
  CHECK(sums == std::vector<double>{1.5, 1.5});
}

TEST_CASE("a file of a wrapped model loads into the plain one, and back", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<int>>(1, [&](const Rank& self) {
    auto net = layers(0.25);
    DistributedDataParallel model(net, in(self));
    model->forward(torch::arange(12, at::kFloat).view({4, 3})).sum().backward();
    const auto from_wrapper = saved(model), from_plain = saved(net);
    const auto same = [](const Layers& a, const Layers& b) {
      return static_cast<int>(
          all_equal(a->parameters(), b->parameters()) && all_equal(a->buffers(), b->buffers()));
    };
    std::vector<int> equal;
    Layers plain;
    load(plain, from_wrapper);
    equal.push_back(same(plain, net));
    Layers other;
    DistributedDataParallel wrapped(other, in(self));
    load(wrapped, from_plain);
    equal.push_back(same(other, net));
    load(other, other_model());
    load(wrapped, from_wrapper);
    equal.push_back(same(other, net));
    return equal;
  });
  CHECK(seen[0] == std::vector<int>{1, 1, 1});
}

TEST_CASE("files with the wrapper's prefix \"module.\" can be loaded", "[ranks][ddp]") {
  const auto equal = run_ranks<int>(1, [&](const Rank& self) {
    // As torch::nn::Module::save writes a wrapper.
    Layers net;
    torch::serialize::OutputArchive inner, outer;
    net->save(inner);
    outer.write("module", inner);
    std::ostringstream out;
    outer.save_to(out);
    Layers other;
    DistributedDataParallel wrapped(other, in(self));
    load(wrapped, out.str());
    return static_cast<int>(torch::equal(other->first->weight, net->first->weight));
  });
  CHECK(equal[0] == 1);
}

TEST_CASE("a module with a child called module is saved and loaded", "[ranks][ddp]") {
  const auto equal = run_ranks<int>(1, [&](const Rank& self) {
    Nested net, plain, other;
    DistributedDataParallel model(net, in(self));
    DistributedDataParallel wrapped(other, in(self));
    load(plain, saved(model));
    load(wrapped, saved(net));
    return static_cast<int>(
        torch::equal(plain->module->weight, net->module->weight) &&
        torch::equal(other->module->weight, net->module->weight));
  });
  CHECK(equal[0] == 1);
}

TEST_CASE("the error for a file of another model names a parameter", "[ranks][ddp][errors]") {
  const auto errors = errors_of_ranks(1, [&](const Rank& self) {
    Layers net;
    DistributedDataParallel model(net, in(self));
    load(model, saved(Nested()));
  });
  CHECK_THAT(errors[0], ContainsText("first"));
}

}  // namespace ddp
