// Regions that exchange parameters from time to time, beside a plain simulation in one process.
#include <ddp/diloco.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/process_group.h>
#include <torch/torch.h>

#include "local_sgd/diloco/exchange.h"
#include "support/archives.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "training/diloco_simulation.h"

#include "support/catch.h"

namespace {

using ddp::DiLoCo;
using ddp::DiLoCoOptions;
using ddp::DiLoCoWire;
using namespace ddp::diloco_simulation;
using namespace ddp::testing;

/// A rank of a world of regions of equal sizes.
struct Placed {
  int64_t region;
  DiLoCoOptions options;
};

Placed place(const Rank& self, int per_region, DiLoCoOptions options) {
  const int region = self.rank / per_region;
  const bool is_leader = self.rank % per_region == per_region - 1;  // not rank 0 of the region
  if (per_region > 1) options.local(ddp::split_group(region, 0, self.group));
  options.regions(ddp::split_group(is_leader ? 0 : -1, 0, self.group));
  return {region, options};
}

void train_region(
    DiLoCo& diloco, const Tensors& parameters, int64_t region, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    take_inner_step(parameters, region, step);
    diloco.average_parameters(parameters);
  }
}

at::Tensor read(const std::string& bytes, const char* key) {
  auto archive = archive_of(bytes);
  at::Tensor value;
  archive.read(key, value);
  return value;
}

}  // namespace

TEST_CASE("the wires: bytes, exactness and values that are not finite", "[diloco][pure]") {
  const auto wire = GENERATE(DiLoCoWire::Float32, DiLoCoWire::BFloat16, DiLoCoWire::Int8);
  const int64_t elements = GENERATE(1, 256, 700);
  CAPTURE(static_cast<int>(wire), elements);
  const auto values = (at::arange(elements, at::kFloat) * 0.7).sin() * 3;
  const auto bytes = ddp::encode(wire, values);
  const auto blocks = (elements + 255) / 256;
  const int64_t expected = wire == DiLoCoWire::Float32    ? 4 * elements
                           : wire == DiLoCoWire::BFloat16 ? 2 * elements
                                                          : elements + 4 * blocks;
  CHECK(bytes.numel() == expected);
  CHECK(ddp::encoded_bytes(wire, elements) == expected);
  const auto decoded = ddp::decode(wire, bytes, elements);
  const double largest_error = (decoded - values).abs().max().item<double>();
  CHECK(
      largest_error <= (wire == DiLoCoWire::Float32    ? 0.0
                        : wire == DiLoCoWire::BFloat16 ? 3.0 / 256
                                                       : 1.5 / 127));
  CHECK(at::equal(
      ddp::decode(wire, ddp::encode(wire, at::zeros({elements})), elements),
      at::zeros({elements})));
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    auto broken = values.clone();
    broken[elements - 1] = bad;
    const auto seen = ddp::decode(wire, ddp::encode(wire, broken), elements);
    CHECK_FALSE(at::isfinite(seen).all().item<bool>());
  }
}

TEST_CASE("DiLoCo equals a simulation in one process", "[diloco][ranks]") {
  const auto options = GENERATE(
      DiLoCoOptions(), DiLoCoOptions().fragments(4), DiLoCoOptions().fragments(3).overlap(2),
      DiLoCoOptions().overlap(6).mix(0.5), DiLoCoOptions().nesterov(false).outer_lr(0.4),
      DiLoCoOptions().outer_momentum(0).outer_lr(1),
      DiLoCoOptions().error_feedback(true).fragments(6).overlap(1).mix(0.25));
  const int regions = GENERATE(1, 2, 3);
  CAPTURE(regions, options.fragments(), options.overlap(), options.mix(), options.nesterov());
  const int64_t steps = 22;
  auto full = options;
  full.sync_every(6).wire(DiLoCoWire::Float32);
  const auto expected = simulate(regions, full, steps);
  const auto seen = run_ranks<at::Tensor>(regions, [&](const Rank& self) {
    auto [region, own] = place(self, 1, full);
    const auto parameters = begin_parameters(region);
    DiLoCo diloco(parameters, own);
    train_region(diloco, parameters, region, 0, steps);
    diloco.finish();
    const auto stats = diloco.stats();
    TORCH_CHECK(stats.regions.size() == static_cast<size_t>(self.size), "regions");
    TORCH_CHECK((stats.bytes_sent > 0) == (self.size > 1), "bytes");
    return flat_of(parameters);
  });
  for (int r = 0; r < regions; ++r) {
    CAPTURE(r);
    CHECK(at::allclose(seen[r].to(at::kDouble), expected[r], 0, 1e-6));
  }
}

TEST_CASE("double parameters keep their precision", "[diloco][ranks]") {
  const auto options =
      DiLoCoOptions().sync_every(2).outer_lr(1).outer_momentum(0).wire(DiLoCoWire::Float32);
  const auto of = [](int64_t region) {
    return Tensors{
        at::full({3}, 1 + 1e-12, at::kDouble), at::full({2}, 0.1F, at::kFloat),
        at::full({2}, M_PI, at::kDouble) + static_cast<double>(region)};
  };
  struct Seen {
    Tensors begun, ended;
    std::string saved;
  };
  const auto seen = run_ranks<Seen>(4, [&](const Rank& self) {
    auto [region, own] = place(self, 2, options);
    const auto parameters = of(region);
    DiLoCo diloco(parameters, own);
    Seen result;
    for (const auto& parameter : parameters) result.begun.push_back(parameter.clone());
    for (int step = 0; step < 2; ++step) {
      for (const auto& parameter : parameters) {
        parameter.add_(1e-6 * static_cast<double>(region + 1));
      }
      diloco.average_parameters(parameters);
    }
    diloco.finish();
    result.ended = parameters;
    result.saved = bytes_of_archive(diloco);
    auto archive = archive_of(result.saved);
    diloco.load(archive);
    TORCH_CHECK(bytes_of_archive(diloco) == result.saved, "not what was saved");
    return result;
  });
  const auto first = of(0);
  for (const auto& [begun, ended, saved] : seen) {
    for (size_t i = 0; i < first.size(); ++i) {
      CHECK(at::equal(begun[i], first[i]));
      const double tolerance = first[i].scalar_type() == at::kDouble ? 1e-12 : 1e-7;
      CHECK((ended[i] - first[i] - 3e-6).abs().max().item<double>() < tolerance);
      CHECK(at::equal(ended[i], seen[0].ended[i]));
    }
  }
}

TEST_CASE("outer parameters have the same bits on all ranks of all regions", "[diloco][ranks]") {
  const auto wire = GENERATE(DiLoCoWire::Float32, DiLoCoWire::BFloat16, DiLoCoWire::Int8);
  const int regions = GENERATE(2, 3);
  CAPTURE(static_cast<int>(wire), regions);
  const auto options = DiLoCoOptions().sync_every(6).fragments(2).overlap(2).wire(wire);
  const auto saved = run_ranks<std::string>(2 * regions, [&](const Rank& self) {
    auto [region, own] = place(self, 2, options);
    const auto parameters = begin_parameters(region);
    DiLoCo diloco(parameters, own);
    train_region(diloco, parameters, region, 0, 20);
    diloco.finish();
    return bytes_of_archive(diloco);
  });
  for (const char* key : {"outer", "momentum"}) {
    for (const auto& bytes : saved) CHECK(at::equal(read(bytes, key), read(saved[0], key)));
  }
  auto exact = options;
  exact.wire(DiLoCoWire::Float32);
  const auto expected = simulate(regions, exact, 20);
  // The last fragment to arrive is equal to the outer one in the simulation as well.
  const auto outer = read(saved[0], "outer").to(at::kDouble);
  const auto last = outer.narrow(0, outer.numel() / 2, outer.numel() - outer.numel() / 2);
  CHECK(
      last.sub(expected[0].narrow(0, outer.numel() / 2, last.numel())).abs().max().item<double>() <
      0.05);
}

TEST_CASE("a run that is resumed with a mean on its way has the same bits", "[diloco][ranks]") {
  const auto wire = GENERATE(DiLoCoWire::BFloat16, DiLoCoWire::Int8);
  const int64_t saved_after = GENERATE(7, 9, 12);  // on its way, on its way, and not
  CAPTURE(static_cast<int>(wire), saved_after);
  const auto options =
      DiLoCoOptions().sync_every(6).overlap(4).mix(0.3).wire(wire).error_feedback(true);
  const auto results = run_ranks<std::vector<std::string>>(4, [&](const Rank& self) {
    auto [region, own] = place(self, 2, options);
    const auto parameters = begin_parameters(region);
    Tensors kept;
    std::string bytes, whole;
    {
      DiLoCo diloco(parameters, own);
      train_region(diloco, parameters, region, 0, saved_after);
      bytes = bytes_of_archive(diloco);
      for (const auto& p : parameters) kept.push_back(p.clone());
      train_region(diloco, parameters, region, saved_after, 25);
      diloco.finish();
      whole = bytes_of_archive(diloco);
    }
    const auto again = begin_parameters(region + 5);
    DiLoCo resumed(again, own);
    auto archive = archive_of(bytes);
    resumed.load(archive);
    for (size_t i = 0; i < kept.size(); ++i) again[i].copy_(kept[i]);
    train_region(resumed, again, region, saved_after, 25);
    resumed.finish();
    TORCH_CHECK(resumed.step() == 25 && at::equal(flat_of(again), flat_of(parameters)));
    return std::vector<std::string>{whole, bytes_of_archive(resumed)};
  });
  for (const auto& result : results) {
    for (const char* key : {"outer", "momentum", "residual"}) {
      CHECK(at::equal(read(result[0], key), read(result[1], key)));
    }
  }
}

TEST_CASE("error feedback sends what few bits leave out", "[diloco][ranks]") {
  const bool feedback = GENERATE(false, true);
  const auto outer = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    auto [region, own] = place(
        self, 1,
        DiLoCoOptions()
            .sync_every(1)
            .outer_lr(1)
            .outer_momentum(0)
            .wire(DiLoCoWire::Int8)
            .error_feedback(feedback));
    const Tensors parameters{at::zeros({2})};
    DiLoCo diloco(parameters, own);
    for (int step = 0; step < 20; ++step) {
      parameters[0].sub_(at::tensor({127.0F, 0.3F}));  // a block's scale is 1
      diloco.average_parameters(parameters);
    }
    return parameters[0];
  });
  CHECK(outer[0][0].item<float>() == -20 * 127);
  CHECK(outer[0][1].item<float>() == Approx(feedback ? -6 : 0).margin(1));
}

TEST_CASE("one line beside PostLocalSGDOptimizer", "[diloco][ranks]") {
  const auto weights = run_ranks<Tensors>(2, [](const Rank& self) {
    const auto train_with = [&](const auto& make_averager) {
      torch::nn::Linear net(2, 3);
      {
        const torch::NoGradGuard no_grad;
        for (auto& p : net->parameters()) p.copy_(at::arange(p.numel()).view_as(p) * 0.1);
      }
      ddp::PostLocalSGDOptimizer optimizer(
          std::make_shared<torch::optim::SGD>(net->parameters(), 0.1), make_averager(net));
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        net->forward(at::full({1, 2}, 1.0F + static_cast<float>(self.rank))).sum().backward();
        optimizer.step();
      }
      return net->weight.detach();
    };
    return Tensors{
        train_with([&](auto&) {
          return std::make_shared<ddp::PeriodicModelAverager>(3, /*warmup_steps=*/2, self.group);
        }),
        train_with([&](auto& net) {
          auto options = place(self, 1, DiLoCoOptions()).options;
          options.sync_every(3).outer_lr(1).outer_momentum(0).wire(DiLoCoWire::Float32);
          return std::make_shared<DiLoCo>(net->parameters(), options);
        })};
  });
  for (const auto& pair : weights) CHECK(at::allclose(pair[0], pair[1], 0, 1e-6));
}

TEST_CASE("DiLoCo's errors come on every rank", "[diloco][ranks][errors]") {
  const std::string kind =
      GENERATE("option", "other option", "parameters", "two leaders", "not finite");
  CAPTURE(kind);
  const auto errors = run_ranks<std::string>(4, [&](const Rank& self) {
    auto placed = place(self, 2, DiLoCoOptions().sync_every(4).overlap(2));
    auto& own = placed.options;
    auto parameters = begin_parameters(0);
    const bool is_other = self.rank == 3;
    if (kind == "option" && is_other) own.overlap(5);
    if (kind == "other option" && is_other) own.mix(0.5);
    if (kind == "parameters" && is_other) parameters.pop_back();
    if (kind == "two leaders") own.regions(ddp::split_group(0, 0, self.group));
    const auto error = error_of([&] {
      DiLoCo diloco(parameters, own);
      train_region(diloco, parameters, placed.region, 0, 3);
      if (kind == "not finite" && placed.region == 1) parameters[1].fill_(NAN);
      train_region(diloco, parameters, placed.region, 3, 8);
    });
    // A rank that leaves its groups at once would end the others' last collective.
    const auto key = [](int rank) { return "has ended/" + std::to_string(rank); };
    self.store->set(key(self.rank), "1");
    for (int rank = 0; rank < self.size; ++rank) self.store->wait({key(rank)});
    return error;
  });
  const std::string text = kind == "option"         ? "expected an overlap from 0 to sync_every"
                           : kind == "other option" ? "expected the same options and parameters"
                           : kind == "parameters"   ? "2 parameters of 38 elements"
                           : kind == "two leaders"  ? "expected one rank of a region"
                                                    : "expected finite parameters in all regions";
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    CHECK_THAT(errors[rank], ContainsText(text));
    CHECK(errors[rank] == errors[0]);
  }
}

TEST_CASE("a region that is lost ends the others' wait", "[diloco][ranks][errors]") {
  const auto errors = errors_of_ranks(4, [&](const Rank& self) {
    const auto placed = place(self, 2, DiLoCoOptions().sync_every(4).overlap(2));
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, placed.options);
    train_region(diloco, parameters, placed.region, 0, 3);
    TORCH_CHECK(placed.region == 0, "region 1 is gone");
    train_region(diloco, parameters, placed.region, 3, 8);
  });
  for (const auto& error : errors) CHECK(error != "");
}

TEST_CASE("what DiLoCo refuses, and an exchange that is dropped", "[diloco][ranks][errors]") {
  const auto error_with = [](const DiLoCoOptions& options, Tensors parameters) {
    return error_of([&] { DiLoCo(std::move(parameters), options); });
  };
  const Tensors some{at::ones({4})};
  CHECK_THAT(error_with(DiLoCoOptions(), {}), ContainsText("expected parameters, got none"));
  CHECK_THAT(error_with(DiLoCoOptions(), {at::ones({2}, at::kLong)}), ContainsText("floating"));
  CHECK_THAT(error_with(DiLoCoOptions().sync_every(0), some), ContainsText("sync_every"));
  CHECK_THAT(error_with(DiLoCoOptions().fragments(5), some), ContainsText("number of elements, 4"));
  CHECK_THAT(error_with(DiLoCoOptions().mix(1), some), ContainsText("mix in [0, 1)"));
  DiLoCo alone(some, DiLoCoOptions());
  CHECK_THAT(error_of([&] { alone.average_parameters(Tensors{}); }), ContainsText("the 1 param"));
  CHECK_THAT(error_of([&] { alone.rebind(); }), ContainsText("DiLoCo::rebind: expected"));
  // Region 1 does not come; the destructor of region 0 ends all the same.
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    auto [region, own] = place(self, 1, DiLoCoOptions().sync_every(2).overlap(2));
    const auto parameters = begin_parameters(region);
    DiLoCo diloco(parameters, own);
    train_region(diloco, parameters, region, 0, region == 0 ? 2 : 1);
    if (region == 1) self.wait_until_others_end();
  });
  CHECK(errors == std::vector<std::string>{"", ""});
}
