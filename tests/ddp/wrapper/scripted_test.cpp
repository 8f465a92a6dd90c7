// TorchScript modules.
#include <memory>
#include <string>
#include <vector>

#include <ddp/checkpointer.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/gradients.h>
#include <ddp/zero.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;
using Scripted = DistributedDataParallel<torch::jit::Module>;

/// A layer in a layer, with a buffer that counts and one that is averaged in place.
torch::jit::Module make_script(const std::string& forward) {
  torch::jit::Module inner("Inner");
  inner.register_parameter("weight", (at::arange(3, at::kDouble) / 3).requires_grad_(), false);
  inner.register_buffer("mean", at::zeros({3}, at::kDouble));
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.define(forward);
  torch::jit::Module net("Net");
  net.register_module("inner", inner);
  net.register_parameter("scale", at::full({1}, 2, at::kDouble).requires_grad_(), false);
  net.register_parameter("frozen", at::full({1}, 5, at::kDouble), false);
  net.register_attribute("training", c10::BoolType::get(), true);
  net.define(R"(
    def forward(self, x):
      return self.inner.forward(x) * self.scale
    def named(self, parts: Dict[str, Tuple[Tensor, int]]) -> Dict[str, List[Tensor]]:
      return {"out": [self.inner.forward(parts["x"][0]) * self.scale]}
  )");
  return net;
}

constexpr const char* kInPlace = R"(
  def forward(self, x):
    if self.training:
      self.mean.mul_(0.5).add_(x.detach().mean(0))
    return x * self.weight
)";

at::Tensor rows_for(int rank, int step = 0) {
  return draw_values({4, 3}, static_cast<uint64_t>(10 * step + rank + 1));
}

Tensors trained_alone(int ranks, int steps) {
  auto weight = (at::arange(3, at::kDouble) / 3).requires_grad_();
  auto scale = at::full({1}, 2, at::kDouble).requires_grad_();
  auto mean = at::zeros({3}, at::kDouble);
  torch::optim::SGD optimizer(Tensors{weight, scale}, 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < ranks; ++rank) {
      sum = sum + (rows_for(rank, step) * weight * scale).square().mean();
    }
    (sum / ranks).backward();
    optimizer.step();
    mean = mean / 2 + rows_for(0, step).mean(0);  // rank 0's
  }
  return {weight, scale, mean};
}

Tensors tensors_of(const torch::jit::Module& script) {
  const auto inner = script.attr("inner").toModule();
  return {
      inner.attr("weight").toTensor(), script.attr("scale").toTensor(),
      inner.attr("mean").toTensor()};
}

}  // namespace

TEST_CASE("a TorchScript module trains as one process does", "[ranks][ddp][many]") {
  const auto way = GENERATE(as<std::string>(), "forward", "dict", "run");
  CAPTURE(way);
  constexpr int kRanks = 3;
  const auto results = run_ranks<Tensors>(kRanks, [&](const Rank& self) {
    DistributedDataParallel model(make_script(kInPlace), in(self).bucket_cap_mb(1e-5));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const auto x = rows_for(self.rank, step);
      at::Tensor out;
      if (way == "forward") out = model->forward({x}).toTensor();
      if (way == "run") out = model->run([&] { return model->module().forward({x}); }).toTensor();
      if (way == "dict") {
        c10::Dict<std::string, std::tuple<at::Tensor, int64_t>> parts;
        parts.insert("x", std::make_tuple(x, int64_t{1}));
        out = model->run([&] { return model->module().run_method("named", parts); })
                  .toGenericDict()
                  .at("out")
                  .toTensorVector()[0];
      }
      model->zero_grad();
      out.square().mean().backward();
      optimizer.step();
    }
    model->check_replicas({&optimizer});
    return tensors_of(model->module());
  });
  const auto expected = trained_alone(kRanks, 3);
  for (const auto& tensors : results) CHECK(largest_difference(tensors, expected) < 1e-14);
}

TEST_CASE("a wrapped TorchScript module has the script's names, modes and copies", "[ranks][ddp]") {
  const auto results = run_ranks<std::vector<std::string>>(1, [](const Rank& self) {
    Scripted model(make_script(kInPlace), in(self));
    std::vector<std::string> names;
    for (const auto& p : model->named_parameters()) names.push_back(p.key());
    for (const auto& b : model->named_buffers()) names.push_back(b.key());
    const auto is_training = [&] {
      return std::string(model->module().attr("inner").toModule().is_training() ? "train" : "eval");
    };
    model->eval();
    names.push_back(is_training());
    model->train();
    names.push_back(is_training());
    auto copy = model->snapshot();
    const auto same = tensors_of(copy);
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.add_(1);
    }
    names.push_back(all_equal(same, tensors_of(make_script(kInPlace))) ? "copied" : "shared");
    names.push_back(
        same[0].requires_grad() && !copy.attr("frozen").toTensor().requires_grad() ? "trainable"
                                                                                   : "frozen");
    return names;
  });
  CHECK(
      results[0] == std::vector<std::string>{
                        "module.scale", "module.frozen", "module.inner.weight", "module.inner.mean",
                        "eval", "train", "copied", "trainable"});
}

TEST_CASE("a TorchScript module trains with what other modules have", "[ranks][ddp]") {
  const auto way = GENERATE(as<std::string>(), "stage 1", "stage 2", "checkpoint", "clip");
  CAPTURE(way);
  const TemporaryFolder folder;
  const auto results = run_ranks<Tensors>(2, [&](const Rank& self) {
    Scripted model(make_script(kInPlace), in(self));
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (way == "stage 1" || way == "stage 2") {
      optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(
          model, torch::optim::SGDOptions(0.1), ZeroOptions().stage(way == "stage 1" ? 1 : 2));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    }
    const auto train = [&](Scripted& trained, int step) {
      trained->zero_grad();
      trained->forward({rows_for(self.rank, step)}).toTensor().square().mean().backward();
      if (way == "clip") clip_grad_norm_(*trained, 1e9);
      optimizer->step();
    };
    train(model, 0);
    train(model, 1);
    if (way != "checkpoint") {
      train(model, 2);
      return tensors_of(model->module());
    }
    const auto options = CheckpointerOptions().process_group(self.group);
    Checkpointer checkpointer(folder.path(), options);
    checkpointer.add("model", model);
    checkpointer.save(2);
    checkpointer.wait();
    Scripted resumed(make_script(kInPlace), in(self));
    Checkpointer reader(folder.path(), options);
    reader.add("model", resumed);
    reader.load_latest();
    optimizer = std::make_unique<torch::optim::SGD>(resumed->parameters(), 0.1);
    train(resumed, 2);
    return tensors_of(resumed->module());
  });
  const auto expected = trained_alone(2, 3);
  for (const auto& tensors : results) CHECK(largest_difference(tensors, expected) < 1e-14);
}

TEST_CASE("a TorchScript module computes in 16 bits", "[ranks][ddp]") {
  const auto results = run_ranks<Tensors>(2, [&](const Rank& self) {
    Scripted model(
        make_script(kInPlace),
        in(self).mixed_precision(MixedPrecision().param_dtype(at::kBFloat16)));
    const auto out = model->forward({rows_for(self.rank)}).toTensor();
    out.square().mean().backward();
    return Tensors{out.detach(), tensors_of(model->module())[0].grad()};
  });
  for (const auto& result : results) {
    CHECK(result[0].scalar_type() == at::kBFloat16);  // the arguments were cast
    CHECK(result[1].scalar_type() == at::kDouble);
    CHECK(at::equal(result[1], results[0][1]));
  }
}

TEST_CASE("a script that assigns to a buffer is an error that names it", "[ranks][ddp][errors]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    Scripted model(
        make_script("def forward(self, x):\n"
                    "  self.mean = self.mean * 0.5\n"
                    "  return x * self.weight\n"),
        in(self));
    model->forward({rows_for(self.rank)}).toTensor().sum().backward();
  });
  CHECK_THAT(
      error, ContainsText("expected a TorchScript module that writes its buffers in place") &&
                 ContainsText("assigned another tensor to \"mean\"") &&
                 ContainsText("Write self.mean.copy_(...)"));
}

TEST_CASE("unused parameters of a script are found", "[ranks][ddp]") {
  const auto results = run_ranks<int>(2, [](const Rank& self) {
    Scripted model(
        make_script("def forward(self, x):\n  return x if x.dim() == 1 else x * self.weight\n"),
        in(self).find_unused_parameters(true));
    const auto x = self.rank == 0 ? rows_for(0) : rows_for(1)[0];
    model->forward({x}).toTensor().sum().backward();
    const auto weight = model->module().attr("inner").toModule().attr("weight").toTensor();
    return largest_difference({weight.grad()}, {rows_for(0).sum(0) * 2 / 2}) < 1e-14 ? 1 : 0;
  });
  CHECK(results == std::vector<int>{1, 1});
}

TEST_CASE("a parameter with two names in a script is stepped once", "[ranks][ddp]") {
  const auto values = run_ranks<double>(2, [](const Rank& self) {
    torch::jit::Module script("Tied");
    const auto weight = at::full({1}, 1, at::kDouble).requires_grad_();
    script.register_parameter("table", weight, false);
    script.register_parameter("head", weight, false);
    script.define("def forward(self, x):\n  return x * self.table + x * self.head\n");
    Scripted model(script, in(self));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    model->forward({at::ones({1}, at::kDouble)}).toTensor().sum().backward();
    optimizer.step();
    return weight.item<double>();
  });
  for (const double value : values) CHECK(value == Approx(0.8));
}

TEST_CASE("tensors of a script that are not trained are warned of", "[ranks][ddp]") {
  const auto counts = run_ranks<int>(1, [](const Rank& self) {
    const Warnings warnings;
    auto script = make_script(kInPlace);
    script.register_attribute(
        "history", c10::ListType::ofTensors(), std::vector<at::Tensor>{at::ones({2})});
    script.register_attribute("sizes", c10::ListType::ofInts(), std::vector<int64_t>{2});
    Scripted model(script, in(self));
    return warnings.count("got others in history:");
  });
  CHECK(counts[0] == 1);
}

TEST_CASE("keyword arguments of a script count as its samples", "[ranks][ddp]") {
  const auto results = run_ranks<at::Tensor>(2, [](const Rank& self) {
    Scripted model(make_script(kInPlace), in(self).reduction(Reduction::SampleWeighted));
    const auto x = rows_for(self.rank).narrow(0, 0, self.rank + 1);
    model->forward({}, {{"x", x}}).toTensor().square().mean().backward();
    return tensors_of(model->module())[0].grad();
  });
  auto weight = (at::arange(3, at::kDouble) / 3).requires_grad_();
  const auto rows = at::cat({rows_for(0).narrow(0, 0, 1), rows_for(1).narrow(0, 0, 2)});
  (rows * weight * 2).square().mean().backward();
  for (const auto& gradient : results) CHECK(difference(gradient, weight.grad()) < 1e-14);
}

TEST_CASE("a script without parameters is refused", "[ranks][ddp][errors]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    torch::jit::Module script("Empty");
    script.define("def forward(self, x):\n  return x\n");
    Scripted(script, in(self));
  });
  CHECK_THAT(error, ContainsText("doesn't have any parameter that requires a gradient"));
}

}  // namespace ddp
