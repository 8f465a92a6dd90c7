#include "benchmarks/ddp_bench/models/models.h"

#include <cmath>
#include <map>

#include <torch/torch.h>

#include "benchmarks/ddp_bench/fingerprint.h"

#include "support/catch.h"

namespace {

using ddp_bench::make_task;

int64_t count_parameters(const ddp_bench::Task& task) {
  int64_t count = 0;
  for (const auto& parameter : task.net->parameters()) count += parameter.numel();
  return count;
}

}  // namespace

TEST_CASE("models and batches have the sizes of the README", "[benchmarks][pure]") {
  struct Sizes {
    int64_t parameters;
    std::vector<int64_t> input;
  };
  const std::map<std::string, Sizes> sizes = {
      {"mnist", {1199882, {32, 1, 28, 28}}},
      {"mlp", {16785408, {32, 2048}}},
      {"small_params", {224000, {8, 32}}},
      {"resnet18", {11173962, {16, 3, 32, 32}}},
      {"transformer", {5268456, {4, 64}}}};
  REQUIRE(ddp_bench::model_names().size() == sizes.size());
  for (const auto& name : ddp_bench::model_names()) {
    CAPTURE(name);
    const auto task = make_task(name, 1, 0);
    CHECK(count_parameters(task) == sizes.at(name).parameters);
    CHECK(task.input.sizes() == at::IntArrayRef(sizes.at(name).input));
  }
  CHECK(make_task("small_params", 1, 0).net->parameters().size() == 800);
}

TEST_CASE("a step's loss is finite, and every parameter has a gradient", "[benchmarks][pure]") {
  for (const auto& name : ddp_bench::model_names()) {
    CAPTURE(name);
    const auto task = make_task(name, 1, 0);
    const auto loss = task.loss(task.net->forward(task.input), task.target);
    loss.backward();
    CHECK(std::isfinite(loss.item<double>()));
    for (const auto& parameter : task.net->parameters()) CHECK(parameter.grad().defined());
  }
}

TEST_CASE("parameters depend on the seed, data also on the rank", "[benchmarks][pure]") {
  const auto first = make_task("small_params", 1, 0);
  const auto hash = [](const ddp_bench::Task& task) {
    return ddp_bench::fingerprint(task.net->parameters()).hash;
  };
  torch::rand({3});  // the generator's state does not matter
  const auto again = make_task("small_params", 1, 0);
  CHECK(hash(again) == hash(first));
  CHECK(torch::equal(again.input, first.input));
  CHECK(torch::equal(again.target, first.target));

  const auto other_rank = make_task("small_params", 1, 1);
  CHECK(hash(other_rank) == hash(first));
  CHECK_FALSE(torch::equal(other_rank.input, first.input));
  CHECK(hash(make_task("small_params", 2, 0)) != hash(first));
}

TEST_CASE("tasks come in bfloat16, and with larger batches", "[benchmarks][pure]") {
  for (const char* name : {"small_params", "transformer"}) {
    CAPTURE(name);
    const auto task = make_task(name, 1, 0, {at::kCPU, at::kBFloat16, /*batch=*/3});
    const auto plain = make_task(name, 1, 0);
    CHECK(task.input.size(0) == 3 * plain.input.size(0));
    CHECK(task.target.size(0) == 3 * plain.target.size(0));
    for (const auto& p : task.net->parameters()) CHECK(p.scalar_type() == at::kBFloat16);
    const auto loss = task.loss(task.net->forward(task.input), task.target);
    CHECK(loss.scalar_type() == at::kBFloat16);
    CHECK(std::isfinite(loss.item<double>()));
  }
}

TEST_CASE("an unknown model is refused", "[benchmarks][pure][errors]") {
  CHECK_THROWS_WITH(make_task("vgg", 1, 0), ContainsText("vgg"));
}
