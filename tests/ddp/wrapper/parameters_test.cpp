// Tensors without a module.
#include <string>
#include <vector>

#include <ddp/checkpointer.h>
#include <ddp/distributed_parameters.h>
#include <ddp/gradients.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/archives.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;

/// Splats on a line: their places and widths.
struct Scene {
  explicit Scene(int64_t splats, double shift = 0)
      : means((at::arange(splats, at::kDouble) + shift).requires_grad_()),
        scales(at::full({splats}, 1 + shift, at::kDouble).requires_grad_()) {}

  at::Tensor render(const at::Tensor& where) const {
    return (-(where.unsqueeze(1) - means).square() / scales.square()).exp().sum(1);
  }
  Tensors tensors() const { return {means, scales}; }

  at::Tensor means, scales;
};

at::Tensor view_of(int rank) { return draw_values({4}, 3 + rank); }

at::Tensor loss_of(const Scene& scene, int rank) {
  return scene.render(view_of(rank)).square().sum();
}

/// The tensors of one process after `steps` steps.
Tensors trained_alone(Scene scene, int ranks, int steps) {
  torch::optim::SGD optimizer(scene.tensors(), 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < ranks; ++rank) sum = sum + loss_of(scene, rank);
    (sum / ranks).backward();
    optimizer.step();
  }
  return scene.tensors();
}

}  // namespace

TEST_CASE("tensors without a module train as one process does", "[ranks][ddp][many]") {
  const auto way =
      GENERATE(as<std::string>(), "tensors", "names", "views", "stage 2", "accumulated");
  CAPTURE(way);
  constexpr int kRanks = 3;
  const auto results = run_ranks<Tensors>(kRanks, [&](const Rank& self) {
    const Scene scene(5, 0.1 * self.rank);  // rank 0's, everywhere
    const auto options = in(self).bucket_cap_mb(1e-5).gradient_as_bucket_view(way == "views");
    auto params = way == "names"
                      ? DistributedParameters(
                            {{"means", scene.means}, {"shape.scales", scene.scales}}, options)
                      : DistributedParameters(scene.tensors(), options);
    const auto pass = [&] { return params->run([&] { return loss_of(scene, self.rank); }); };
    if (way == "stage 2") {
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
          params, torch::optim::SGDOptions(0.1), ZeroOptions().stage(2));
      for (int step = 0; step < 4; ++step) {
        params->zero_grad();
        pass().backward();
        optimizer.step();
      }
      return scene.tensors();
    }
    torch::optim::SGD optimizer(params->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      params->zero_grad();
      if (way == "accumulated") {
        const auto guard = params->no_sync();
        (pass() / 2).backward();
      }
      (way == "accumulated" ? pass() / 2 : pass()).backward();
      optimizer.step();
    }
    params->check_replicas({&optimizer});
    return scene.tensors();
  });
  const auto expected = trained_alone(Scene(5), kRanks, 4);
  for (const auto& tensors : results) CHECK(largest_difference(tensors, expected) < 1e-13);
}

TEST_CASE("refresh goes on with other tensors", "[ranks][ddp]") {
  const auto results = run_ranks<Tensors>(2, [](const Rank& self) {
    Scene scene(2);
    DistributedParameters params(scene.tensors(), in(self));
    params->run([&] { return loss_of(scene, self.rank); }).backward();
    scene = Scene(7, 0.1 * self.rank);  // densified
    params->refresh(scene.tensors());
    torch::optim::SGD optimizer(params->parameters(), 0.1);
    params->run([&] { return loss_of(scene, self.rank); }).backward();
    optimizer.step();
    return scene.tensors();
  });
  const auto expected = trained_alone(Scene(7), 2, 1);
  for (const auto& tensors : results) CHECK(largest_difference(tensors, expected) < 1e-13);
}

TEST_CASE("ranks with fewer views join the others'", "[ranks][ddp]") {
  const auto results = run_ranks<Tensors>(2, [](const Rank& self) {
    const Scene scene(3);
    DistributedParameters params(scene.tensors(), in(self));
    torch::optim::SGD optimizer(params->parameters(), 0.1);
    params->join([&] {
      for (int view = 0; view <= self.rank; ++view) {
        optimizer.zero_grad();
        params->run([&] { return loss_of(scene, view); }).backward();
        optimizer.step();
      }
    });
    return scene.tensors();
  });
  CHECK(all_equal(results[0], results[1]));
}

TEST_CASE("the state of tensors without a module has their names", "[ranks][ddp]") {
  const TemporaryFolder folder;
  const auto results = run_ranks<Tensors>(2, [&](const Rank& self) {
    const Scene scene(3, 0.5);
    DistributedParameters params(
        {{"means", scene.means}, {"shape.scales", scene.scales}}, in(self));
    Checkpointer checkpointer(folder.path(), CheckpointerOptions().process_group(self.group));
    checkpointer.add("gaussians", params);
    checkpointer.save(1);
    checkpointer.wait();
    const Scene other(3);
    DistributedParameters loaded(
        {{"means", other.means}, {"shape.scales", other.scales}}, in(self));
    Checkpointer reader(folder.path(), CheckpointerOptions().process_group(self.group));
    reader.add("gaussians", loaded);
    reader.load_latest();
    auto tensors = other.tensors();
    const auto named = params->named_parameters();
    tensors.push_back(named["module.means"]);
    tensors.push_back(named["module.shape.scales"]);
    return tensors;
  });
  const Scene scene(3, 0.5);
  for (const auto& tensors : results) {
    CHECK(all_equal(tensors, {scene.means, scene.scales, scene.means, scene.scales}));
  }
}

TEST_CASE("tensors that cannot be trained are an error of all ranks", "[ranks][ddp][errors]") {
  struct Case {
    std::function<void(const DistributedDataParallelOptions&, bool)> make;
    std::string text;
  };
  const auto leaf = at::ones({2}).requires_grad_();
  using Named = DistributedParametersImpl::NamedTensors;
  const auto named = [](const Named& tensors) {
    return [tensors](const DistributedDataParallelOptions& options, bool is_bad) {
      DistributedParameters(
          is_bad ? tensors : Named{{"a", at::ones({2}).requires_grad_()}}, options);
    };
  };
  const auto [make, text] = GENERATE_COPY(values<Case>({
      {named({{"a", leaf * 2}}),
       "expected leaves, got a tensor that is computed from others in \"a\""},
      {named({{"a", at::Tensor()}}), "expected tensors, got an undefined one in \"a\""},
      {named({{"a", leaf}, {"a", leaf}}), "expected a name for each tensor, got \"a\" twice"},
      {named({{"a", leaf}, {"b", leaf}}),
       "expected tensors that differ, got one as \"a\" and as \"b\""},
      {named({{"a", leaf}, {"a.b", leaf}}),
       "none is the beginning of another, got \"a.b\" and \"a\""},
      {named({{"a..b", leaf}}), "expected names with text between their dots, got \"a..b\""},
      {named({}), "expected at least one tensor"},
      {named({{"a", at::ones({2})}}), "parameter that requires a gradient"},
      {[&](const DistributedDataParallelOptions& options, bool is_bad) {
         DistributedParameters params({{"a", at::ones({2}).requires_grad_()}}, options);
         const auto more = at::ones({3}).requires_grad_();
         params->refresh(is_bad ? Tensors{more, more} : Tensors{more});
       },
       "expected 1 tensors, as at construction, got 2"},
  }));
  CAPTURE(text);
  const auto errors = errors_of_ranks(
      2, kLongTimeout, [&, make = make](const Rank& self) { make(in(self), self.rank == 1); });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText(text));
}

TEST_CASE("a refresh that fails leaves the tensors as they were", "[ranks][ddp][errors]") {
  const auto results = run_ranks<Tensors>(2, [](const Rank& self) {
    const Scene scene(3);
    DistributedParameters params(scene.tensors(), in(self));
    const auto error = error_of([&] { params->refresh({scene.means * 2, scene.scales}); });
    if (error.empty()) return Tensors{};
    torch::optim::SGD optimizer(params->parameters(), 0.1);
    params->run([&] { return loss_of(scene, self.rank); }).backward();
    optimizer.step();
    return scene.tensors();
  });
  for (const auto& tensors : results) {
    CHECK(largest_difference(tensors, trained_alone(Scene(3), 2, 1)) < 1e-13);
  }
}

}  // namespace ddp
