#include <ddp/top_k.h>

#include <cmath>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "training/compression/largest.h"

#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::hooks::TopK;
using ddp::hooks::TopKOptions;

// A model whose gradient the test sets, and the averages that the optimizer would get.
struct TopKRun {
  TopKRun(const Rank& self, const TopKOptions& options, at::ScalarType dtype = torch::kFloat)
      : net(torch::nn::Linear(torch::nn::LinearOptions(4, 1).bias(false))),
        model(make(net, self, dtype)),
        hook(options, self.group) {
    model->register_comm_hook(hook);
  }

  static ddp::DistributedDataParallel<torch::nn::Sequential> make(
      torch::nn::Sequential net, const Rank& self, at::ScalarType dtype) {
    net->to(dtype);
    return ddp::DistributedDataParallel(
        net, ddp::DistributedDataParallelOptions().process_group(self.group));
  }

  std::vector<float> averaged(const std::vector<float>& gradient) {
    net->zero_grad();
    const auto x = torch::tensor(gradient).view({1, 4}).to(net->parameters()[0].scalar_type());
    model->forward(x).sum().backward();
    const auto grad = net->parameters()[0].grad().flatten().to(torch::kFloat);
    return {grad.data_ptr<float>(), grad.data_ptr<float>() + grad.numel()};
  }

  torch::nn::Sequential net;
  ddp::DistributedDataParallel<torch::nn::Sequential> model;
  TopK hook;
};

using Values = std::vector<float>;
using Steps = std::vector<Values>;

}  // namespace

TEST_CASE(
    "TopK averages each rank's largest elements first, and the rest later", "[top_k][ranks]") {
  const auto dtype = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  const auto seen = run_ranks<Steps>(2, [&](const Rank& self) {
    TopKRun run(self, TopKOptions().ratio(0.5), dtype);
    const auto gradient = self.rank == 0 ? Values{8, -4, 2, 0} : Values{0, 2, 4, -8};
    Steps steps;
    for (int step = 0; step < 3; ++step) steps.push_back(run.averaged(gradient));
    return steps;
  });
  // Rank 0 sends 8 and -4, then 8 and 2 + 2 or -4; rank 1 mirrors it.
  CHECK(seen[0][0] == Values{4, -2, 2, -4});
  for (const auto& steps : seen) CHECK(steps == seen[0]);
  const auto sums = run_ranks<Values>(2, [&](const Rank& self) {
    TopKRun run(self, TopKOptions().ratio(0.25), dtype);
    const auto gradient = self.rank == 0 ? Values{4, 2, 1, 0} : Values{0, 1, 2, 4};
    Values sum(4, 0);
    for (int step = 0; step < 64; ++step) {
      const auto mean = run.averaged(gradient);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += mean[i];
    }
    return sum;
  });
  // The residual at the end is bounded: about one step's gradient of each rank.
  const Values expected{128, 96, 96, 128};
  for (size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(sums[0][i] - expected[i]) < 8);
}

TEST_CASE("TopK without error feedback drops elements that are not sent", "[top_k][ranks]") {
  const auto seen = run_ranks<Steps>(2, [](const Rank& self) {
    TopKRun run(self, TopKOptions().ratio(0.25).use_error_feedback(false).start_iter(1));
    Steps steps;
    for (int step = 0; step < 3; ++step) steps.push_back(run.averaged({4, 2, 1, 0}));
    return steps;
  });
  for (const auto& steps : seen) {
    CHECK(steps[0] == Values{4, 2, 1, 0});  // before start_iter
    CHECK(steps[1] == Values{4, 0, 0, 0});
    CHECK(steps[2] == Values{4, 0, 0, 0});
  }
}

TEST_CASE("TopK of all elements is the average", "[top_k][ranks][many]") {
  const int world = GENERATE(1, 3);
  const auto seen = run_ranks<Values>(world, [](const Rank& self) {
    TopKRun run(self, TopKOptions().ratio(1));
    const auto value = static_cast<float>(self.rank);
    return run.averaged({value, 2 * value, 3 * value, -value});
  });
  const float mean = static_cast<float>(world - 1) / 2;
  for (const auto& values : seen) CHECK(values == Values{mean, 2 * mean, 3 * mean, -mean});
}

TEST_CASE("TopK in a join sends the residual of ranks without input", "[top_k][ranks][many]") {
  const auto seen = run_ranks<Steps>(3, [](const Rank& self) {
    TopKRun run(self, TopKOptions().ratio(0.25));
    Steps steps;
    run.model->join([&] {
      // Rank 0 has one batch, and sends 12 of it; 6 and 3 remain as residual.
      for (int step = 0; step < (self.rank == 0 ? 1 : 3); ++step) {
        steps.push_back(run.averaged(self.rank == 0 ? Values{12, 6, 3, 0} : Values{0, 0, 0, 12}));
      }
    });
    steps.push_back(run.averaged({0, 0, 0, 0}));  // all ranks average again
    return steps;
  });
  CHECK(seen[0] == Steps{{4, 0, 0, 8}, {0, 0, 0, 0}});
  for (const int rank : {1, 2}) {
    CHECK(seen[rank] == Steps{{4, 0, 0, 8}, {0, 2, 0, 8}, {0, 0, 1, 8}, {0, 0, 0, 0}});
  }
}

TEST_CASE("TopK continues from a checkpoint as if uninterrupted", "[top_k][ranks]") {
  const TemporaryFolder folder;
  const auto ends = [&](bool is_resumed) {
    return run_ranks<Steps>(2, [&](const Rank& self) {
      const Values gradient{4, 3, 2, 1};
      TopKRun run(self, TopKOptions().ratio(0.25));
      ddp::Checkpointer checkpointer(
          folder.path(), ddp::CheckpointerOptions().process_group(self.group));
      checkpointer.add_per_rank("hook", run.hook);
      if (is_resumed) {
        checkpointer.load(3);
      } else {
        for (int step = 0; step < 3; ++step) run.averaged(gradient);
        checkpointer.save(3);
        checkpointer.wait();
      }
      return Steps{run.averaged(gradient), run.averaged(gradient)};
    });
  };
  const auto whole = ends(false);
  CHECK(ends(true) == whole);
  CHECK(whole[0][0] != Values{4, 0, 0, 0});  // the result without the loaded residual
}

TEST_CASE("the largest magnitudes are those of a full selection", "[top_k][pure]") {
  torch::manual_seed(5);
  const int64_t numel = 100'000;
  const auto kind = GENERATE(0, 1, 2, 3, 4);
  auto values = torch::randn({numel});
  if (kind == 1) values.narrow(0, 0, numel - 50).zero_();  // mostly ties
  if (kind == 2) values.slice(0, 0, numel, 97).mul_(1e3);  // the sample sees only large ones
  if (kind == 3) values.slice(0, 5, numel, 1000).fill_(NAN);
  if (kind == 4) values.fill_(2);
  for (const int64_t count : {1, 97, 1000, 6000, 50'000, 100'000}) {
    CAPTURE(kind, count);
    const auto found = ddp::largest_magnitudes(values, count);
    REQUIRE(found.numel() == count);
    CHECK(std::get<0>(at::_unique(found)).numel() == count);  // each index once
    const auto sorted = [](const at::Tensor& t) { return std::get<0>(t.sort()); };
    const auto expected = std::get<0>(values.abs().topk(count));
    CHECK(torch::allclose(
        sorted(values.abs().index_select(0, found)), sorted(expected), 0, 0, /*equal_nan=*/true));
  }
}

TEST_CASE("TopK refuses options out of their range", "[top_k][errors][ranks]") {
  const auto error = [](const TopKOptions& options) {
    return errors_of_ranks(1, [&](const Rank& self) { TopK(options, self.group); })[0];
  };
  CHECK_THAT(
      error(TopKOptions().ratio(0)), ContainsText("ratio to be above 0 and at most 1, got 0"));
  CHECK_THAT(error(TopKOptions().ratio(1.5)), ContainsText("got 1.5"));
  CHECK_THAT(error(TopKOptions().ratio(std::nan(""))), ContainsText("got nan"));
  CHECK_THAT(error(TopKOptions().start_iter(-1)), ContainsText("at least 0, got -1"));
}
