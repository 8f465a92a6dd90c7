// What a pipeline refuses, and how its ranks end when one fails.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/text.h>

#include "parallel/pipeline/messages/message_header.h"
#include "parallel/pipeline_net.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Errors = std::vector<std::string>;

// Seconds in which all ranks end: less than the timeout, kLongTimeout.
constexpr double kAtMost = 20;

ddp::PipelineOptions error_options(const Rank& self, int64_t microbatches = 4) {
  return ddp::PipelineOptions().process_group(self.group).microbatches(microbatches);
}

/// The errors of ranks that make a stage of `chunks` layers by `options`.
Errors errors_of_stages(
    int ranks, size_t chunks, const std::function<ddp::PipelineOptions(const Rank&)>& options,
    const ddp::LossFn& loss = pipeline_loss) {
  return errors_of_ranks(ranks, [&](const Rank& self) {
    std::vector<Layer> layers;
    for (size_t c = 0; c < chunks; ++c) layers.emplace_back(0);
    const ddp::PipelineStage pipeline(layers, self.rank, self.size, loss, options(self));
  });
}

void check_all(const Errors& errors, const std::string& text) {
  for (const auto& error : errors) CHECK(error == text);
}

TEST_CASE("options that no pipeline can have are refused on every rank", "[errors]") {
  check_all(
      errors_of_stages(2, 2, [](const Rank& self) { return error_options(self); }),
      "PipelineStage: expected one module a rank with PipelineSchedule::OneFOneB, got 2 chunks on "
      "rank 0 of 2. Choose Interleaved, or GPipe.");
  check_all(
      errors_of_stages(
          2, 1, [](const Rank& self) { return error_options(self, self.rank == 1 ? 0 : 1); }),
      "PipelineStage: expected microbatches of at least 1, got 0 on rank 1 of 2.");
  check_all(
      errors_of_stages(
          2, 1, [](const Rank& self) { return error_options(self); }, ddp::LossFn()),
      "PipelineStage: expected a loss function on the last stage, got none on rank 1 of 2.");
  check_all(
      errors_of_stages(2, 0, [](const Rank& self) { return error_options(self); }),
      "PipelineStage: expected a module, or several chunks, got an empty one on rank 0 of 2. Give "
      "each rank its layers.");
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const ddp::PipelineStage pipeline(
        Layer(0), 1 - self.rank, 2, pipeline_loss, error_options(self));
  });
  check_all(
      errors,
      "PipelineStage: expected a stage for each rank of process_group, got stage 1 of 2 on rank 0 "
      "of 2. Pass the axis of the stages: mesh.group(\"pp\") and mesh.rank(\"pp\").");
}

TEST_CASE("a wrapper that would add up sums again is refused", "[errors]") {
  const auto reduction = GENERATE(ddp::Reduction::Sum, ddp::Reduction::SampleWeighted);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    const auto alone = ddp::split_group(self.rank, 0, self.group);
    const ddp::DistributedDataParallel model(
        Layer(0), ddp::DistributedDataParallelOptions().process_group(alone).reduction(reduction));
    const ddp::PipelineStage pipeline(
        model, self.rank, 2, pipeline_loss, error_options(self).reduce_each(true));
  });
  check_all(
      errors,
      "PipelineStage: expected Reduction::Mean of a DistributedDataParallel with reduce_each, got "
      "another one on rank 0 of 2, which would add up what was added up before. Leave reduce_each "
      "out.");
}

TEST_CASE("stages of different options are refused on every rank", "[errors]") {
  check_all(
      errors_of_stages(
          3, 1, [](const Rank& self) { return error_options(self, self.rank == 2 ? 8 : 4); }),
      "PipelineStage: expected the same options on every rank, got microbatches 4 on rank 0 and "
      "microbatches 8 on rank 2. Build all stages from one configuration.");
  check_all(
      errors_of_stages(
          2, 1,
          [](const Rank& self) {
            return error_options(self).schedule(
                self.rank == 0 ? ddp::PipelineSchedule::OneFOneB : ddp::PipelineSchedule::GPipe);
          }),
      "PipelineStage: expected the same options on every rank, got schedule OneFOneB on rank 0 and "
      "schedule GPipe on rank 1. Build all stages from one configuration.");
  const auto of_chunks = errors_of_ranks(2, [](const Rank& self) {
    const std::vector<Layer> chunks(self.rank == 0 ? 2 : 1, Layer(self.rank));
    ddp::PipelineStage(
        chunks, self.rank, 2, pipeline_loss,
        error_options(self).schedule(ddp::PipelineSchedule::GPipe));
  });
  check_all(
      of_chunks,
      "PipelineStage: expected the same options on every rank, got chunks 2 on rank 0 and chunks 1 "
      "on rank 1. Build all stages from one configuration.");
}

/// Does to its argument what a test says.
struct AnyImpl : torch::nn::Module {
  using Forward = std::function<at::Tensor(const at::Tensor&)>;
  explicit AnyImpl(Forward body) : body(std::move(body)) {
    weight = register_parameter("weight", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return body(x) * weight; }
  Forward body;
  at::Tensor weight;
};
TORCH_MODULE(Any);

struct Ended {
  Errors errors;
  double seconds = 0;
};

/// The errors of ranks that run `body`, and how long they take.
Ended ended_ranks(int ranks, const std::function<void(const Rank&)>& body) {
  Ended ended;
  const auto start = std::chrono::steady_clock::now();
  ended.errors = errors_of_ranks(ranks, kLongTimeout, body);
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return ended;
}

/// The errors of steps in which rank `self.rank` has a stage of `body_of(self)`.
Ended errors_of_step(
    int ranks, const std::function<AnyImpl::Forward(const Rank&)>& body_of,
    const std::vector<int64_t>& sizes = {8, 3}, int64_t microbatches = 4) {
  return ended_ranks(ranks, [&](const Rank& self) {
    ddp::PipelineStage pipeline(
        Any(body_of(self)), self.rank, self.size,
        [](const at::Tensor& output, const at::Tensor&) { return output.mean(); },
        error_options(self, microbatches));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(torch::ones(sizes));
    const bool is_last = self.rank == self.size - 1;
    // A rank that has done its part of the step finds the failure in the next one.
    for (int s = 0; s < 2; ++s) {
      pipeline.step(inputs, is_last ? torch::ones({sizes[0]}) : at::Tensor());
    }
  });
}

at::Tensor same(const at::Tensor& x) { return x * 1; }

TEST_CASE("stages of different width", "[errors]") {
  const auto ended = errors_of_step(
      2,
      [](const Rank& self) -> AnyImpl::Forward {
        if (self.rank == 1) {
          torch::nn::Linear fc(512, 2);
          return [fc](const at::Tensor& x) mutable { return fc->forward(x); };
        }
        return [count = 0](const at::Tensor& x) mutable {
          return count++ == 2 ? x.slice(2, 0, 256) : x * 1;
        };
      },
      {16, 128, 512});
  CHECK_THAT(
      ended.errors,
      Each(ContainsText("F2 of stage 1 failed on rank 1 of 2: PipelineStage: expected from stage 0 "
                        "[4, 128, 512] Float for micro-batch 2, got [4, 128, 256] Float on rank 1 "
                        "of 2. Stages have to be cut at the same width. Forward threw: mat1")));
  CHECK(ended.seconds < kAtMost);
}

TEST_CASE("a first micro-batch that a stage cannot use", "[errors]") {
  const auto ended = errors_of_step(2, [](const Rank& self) -> AnyImpl::Forward {
    if (self.rank == 0) return same;
    torch::nn::Linear fc(4, 2);
    return [fc](const at::Tensor& x) mutable { return fc->forward(x); };
  });
  CHECK_THAT(
      ended.errors, Each(
                        ContainsText("F0 of stage 1 failed on rank 1 of 2: mat1") &&
                        ContainsText("Forward got [2, 3] Float from stage 0.")));
}

TEST_CASE("a stage that throws ends all ranks, with the action", "[errors]") {
  const int thrower = GENERATE(0, 1, 2);
  CAPTURE(thrower);
  const auto text = ddp::str("F1 of stage ", thrower, " failed on rank ", thrower, " of 3: boom");
  const auto ended = errors_of_step(3, [&](const Rank& self) -> AnyImpl::Forward {
    if (self.rank != thrower) return same;
    return [count = 0](const at::Tensor& x) mutable {
      if (count++ == 1) throw std::runtime_error("boom");
      return x * 1;
    };
  });
  for (const auto& error : ended.errors) CHECK_THAT(error, ContainsText(text));
  CHECK(ended.seconds < kAtMost);
}

TEST_CASE("a backward that throws ends all ranks, with the action", "[errors]") {
  const auto ended = errors_of_step(3, [](const Rank& self) -> AnyImpl::Forward {
    if (self.rank != 1) return same;
    return [count = 0](const at::Tensor& x) mutable {
      auto y = x * 1;
      if (count++ == 2) {
        y.register_hook([](const at::Tensor&) { throw std::runtime_error("boom"); });
      }
      return y;
    };
  });
  // Not looked for among the ranks' waits, which takes seconds.
  CHECK_THAT(
      ended.errors, Each(
                        ContainsText("B2 of stage 1 failed on rank 1 of 3: boom") &&
                        !ContainsText("had arrived")));
  CHECK(ended.seconds < kAtMost);
}

TEST_CASE("a loss, its scale, and the graph of an input that throw end all ranks", "[errors]") {
  const std::string place = GENERATE("loss", "scale_loss", "input");
  CAPTURE(place);
  const auto throw_in = [&](const char* here) {
    if (place == here) throw std::runtime_error("boom");
  };
  const auto loss = [&](const at::Tensor& output, const at::Tensor&) {
    throw_in("loss");
    return output.mean();
  };
  const auto scale = [&](const at::Tensor& loss) {
    throw_in("scale_loss");
    return loss;
  };
  const auto ended = ended_ranks(3, [&](const Rank& self) {
    ddp::PipelineStage pipeline(
        Any(same), self.rank, self.size, loss, error_options(self).scale_loss(scale));
    for (int s = 0; s < 2; ++s) {
      std::vector<at::Tensor> inputs;
      if (self.rank == 0) {
        inputs.push_back(torch::ones({8, 3}).requires_grad_() * 1);
        inputs[0].register_hook([&](const at::Tensor&) { throw_in("input"); });
      }
      pipeline.step(inputs, self.rank == 2 ? torch::ones({8}) : at::Tensor());
    }
  });
  const auto* const text = place == "input"
                               ? "ending a step of a pipeline failed on rank 0 of 3: boom"
                               : "F0 of stage 2 failed on rank 2 of 3: boom";
  CHECK_THAT(ended.errors, Each(ContainsText(text) && !ContainsText("had arrived")));
  CHECK(ended.seconds < kAtMost);
}

TEST_CASE("a loss may destroy the stage whose step calls it", "[ranks]") {
  const auto losses = run_ranks<double>(2, [](const Rank& self) {
    const auto batch = pipeline_batch(8, 0);
    std::unique_ptr<ddp::PipelineStage<Layer>> pipeline;
    const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
      pipeline.reset();
      return pipeline_loss(output, target);
    };
    pipeline = std::make_unique<ddp::PipelineStage<Layer>>(
        Layer(self.rank), self.rank, self.size, loss, error_options(self));
    const auto result =
        self.rank == 0 ? pipeline->step({batch.input}, {}) : pipeline->step({}, batch.target);
    return result.losses.empty() ? 0 : result.losses[0].item<double>();
  });
  CHECK(losses[1] > 0);
}

TEST_CASE("a wait names the action, the stage and the rank that it waits for", "[errors]") {
  const auto errors = errors_of_ranks(
      2, RanksOptions{std::chrono::seconds(4), std::chrono::seconds(30)}, [](const Rank& self) {
        ddp::PipelineStage pipeline(Layer(0), self.rank, 2, pipeline_loss, error_options(self));
        if (self.rank == 0) return self.wait_until_others_end();
        pipeline.step({}, pipeline_batch(8, 0).target);
      });
  CHECK_THAT(
      errors[1],
      ContainsText("F0 of stage 1, from stage 0 on rank 0 of 2 failed on rank 1 of 2: "));
}

TEST_CASE("a stage that stands still ends the others soon after the timeout", "[errors]") {
  constexpr std::chrono::seconds kTimeout(4);
  std::vector<double> seconds(3);
  const auto errors =
      errors_of_ranks(3, RanksOptions{kTimeout, std::chrono::seconds(30)}, [&](const Rank& self) {
        const auto mesh = ddp::init_device_mesh({3, 1, 1}, {"pp", "dp", "tp"}, self.group);
        // Stands still in one of its forwards, as a process that is stopped.
        const RunLayer layer(0, [&, forwards = 0](Layer& own, const at::Tensor& x) mutable {
          if (self.rank == 1 && forwards++ == 2) self.wait_until_others_end();
          return own->forward(x);
        });
        ddp::PipelineStage pipeline(
            layer, self.rank, 3, pipeline_loss,
            ddp::PipelineOptions().process_group(mesh.group("pp")));
        const auto batch = pipeline_batch(8, 0);
        std::vector<at::Tensor> inputs;
        if (self.rank == 0) inputs.push_back(batch.input);
        const auto seen = timed_error_of(
            [&] { pipeline.step(inputs, self.rank == 2 ? batch.target : at::Tensor()); });
        seconds[static_cast<size_t>(self.rank)] = seen.seconds;
        TORCH_CHECK(self.rank == 1, seen.error);
      });
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_THAT(
        errors[static_cast<size_t>(rank)],
        ContainsText(", from stage 1 on rank 1 of 3 (pp 1, dp 0, tp 0) failed on rank ") &&
            ContainsText("timed out after 4000 ms"));
    CHECK(seconds[static_cast<size_t>(rank)] < kTimeout.count() + 1.9);  // 2 s without the rule
  }
}

TEST_CASE("batches that cannot be cut end all ranks", "[errors]") {
  const auto few = errors_of_step(2, [](const Rank&) { return same; }, {3, 3});
  CHECK_THAT(
      few.errors,
      Each(ContainsText("with at least 4 rows, one for each micro-batch, got 3 on rank")));
  const auto none = errors_of_ranks(2, [](const Rank& self) {
    ddp::PipelineStage pipeline(Layer(0), self.rank, 2, pipeline_loss, error_options(self));
    pipeline.step({}, torch::ones({8, kPipelineWidth}, torch::kDouble));
  });
  CHECK_THAT(
      none,
      Each(ContainsText("expected inputs on the stage that uses them, got none on rank 0 of 2")));
  const auto uneven = errors_of_ranks(1, [](const Rank& self) {
    ddp::PipelineStage pipeline(Layer(0), 0, 1, pipeline_loss, error_options(self));
    pipeline.step({torch::ones({8, 1}), torch::ones({7, 1})}, torch::ones({8}));
  });
  CHECK_THAT(uneven[0], ContainsText("expected inputs with 8 rows, got [7, 1] on rank 0 of 1"));
  const auto empty = errors_of_ranks(2, [](const Rank& self) {
    ddp::PipelineStage pipeline(Layer(0), self.rank, 2, pipeline_loss, error_options(self));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(torch::ones({0, kPipelineWidth}));
    pipeline.eval(inputs);
  });
  CHECK_THAT(
      empty, Each(ContainsText("expected inputs with at least 1 row, got none on rank 0 of 2")));
}

TEST_CASE("ranks that call step() and eval() in another order", "[errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    ddp::PipelineStage pipeline(Layer(0), self.rank, 2, pipeline_loss, error_options(self));
    const auto batch = pipeline_batch(8, 0);
    if (self.rank == 0) {
      pipeline.eval({batch.input});
      pipeline.step({batch.input}, {});
    } else {
      pipeline.step({}, batch.target);
      pipeline.eval({});
    }
  });
  CHECK_THAT(
      errors,
      Each(ContainsText("PipelineStage: expected a message of F0 of stage 0 in call 1, step(), got "
                        "one of F0 of stage 0 in call 1, eval() on rank 1 of 2.")));
}

struct PairImpl : torch::nn::Module {
  PairImpl() { weight = register_parameter("weight", torch::ones({1})); }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {x * weight, x + weight};
  }
  at::Tensor weight;
};
TORCH_MODULE(Pair);

TEST_CASE("a forward of another number of tensors, and losses of another number of elements") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const auto options = error_options(self);
    if (self.rank == 0) {
      ddp::PipelineStage(Pair(), 0, 2, ddp::LossFn(), options).step({torch::ones({4, 3})}, {});
    } else {
      ddp::PipelineStage(Any(same), 1, 2, pipeline_loss, options).step({}, torch::ones({4, 3}));
    }
  });
  CHECK_THAT(
      errors,
      Each(ContainsText("F0 of stage 1 failed on rank 1 of 2: PipelineStage: expected a forward of "
                        "stage 1 that takes 2 tensors, got one that does not on rank 1 of 2.")));
  const auto of_last = errors_of_ranks(1, [](const Rank& self) {
    ddp::PipelineStage(Pair(), 0, 1, pipeline_loss, error_options(self))
        .step({torch::ones({4, 3})}, torch::ones({4, 3}));
  });
  CHECK_THAT(
      of_last[0], ContainsText("expected one tensor of the last stage, got 2 on rank 0 of 1"));
  const auto of_loss = errors_of_ranks(1, [](const Rank& self) {
    const auto difference = [](const at::Tensor& a, const at::Tensor& b) { return a - b; };
    ddp::PipelineStage(Any(same), 0, 1, difference, error_options(self))
        .step({torch::ones({4, 3})}, torch::ones({4, 3}));
  });
  CHECK_THAT(of_loss[0], ContainsText("expected a loss of one element, got [1, 3] on rank 0 of 1"));
}

TEST_CASE("headers of messages keep what they say", "[pure]") {
  ddp::StageMessageHeader header{'B', 5, 3, /*is_filler=*/true, {7, /*trains=*/true}};
  header.tensors.push_back({true, true, at::kBFloat16, {4, 128, 512}});
  header.tensors.push_back({});
  header.tensors.push_back({true, false, at::kLong, {}});
  for (int i = 0; i < 12; ++i) header.tensors.push_back({true, false, at::kBool, {1, 2, i}});
  const auto words = ddp::words_of(header);
  CHECK(static_cast<int64_t>(words.size()) == 9 + 4 + 1 + 1 + 12 * 4);
  CHECK(ddp::words_of_second_part(words) == static_cast<int64_t>(words.size()) - ddp::kHeaderWords);
  const auto read = ddp::header_of(words);
  CHECK((read.kind == 'B' && read.stage == 5 && read.microbatch == 3 && read.is_filler));
  CHECK(ddp::text_of(read.tensors) == ddp::text_of(header.tensors));
  CHECK((read.tensors[0].requires_grad && !read.tensors[2].requires_grad));
  const ddp::StageMessageHeader same{'B', 5, 3, false, {7, true}};
  CHECK_NOTHROW(ddp::check_header(read, same, "on rank 0 of 2"));
  for (const auto& [other, text] : std::vector<std::pair<ddp::StageMessageHeader, std::string>>{
           {{'F', 5, 3, false, {7, true}}, "F3 of stage 5 in call 7, step()"},
           {{'B', 4, 3, false, {7, true}}, "B3 of stage 4 in call 7, step()"},
           {{'B', 5, 2, false, {7, true}}, "B2 of stage 5 in call 7, step()"},
           {{'B', 5, 3, false, {6, true}}, "B3 of stage 5 in call 6, step()"},
           {{'B', 5, 3, false, {7, false}}, "B3 of stage 5 in call 7, eval()"}}) {
    CHECK_THROWS_WITH(
        ddp::check_header(read, other, "on rank 0 of 2"),
        ContainsText(
            "expected a message of " + text +
            ", got one of B3 of stage 5 in call 7, step() on rank 0 of 2."));
  }
  CHECK(ddp::words_of({'F', 0, 0, false, {}, {}}).size() == static_cast<size_t>(ddp::kHeaderWords));
  CHECK_THROWS_WITH(
      ddp::words_of_second_part(std::vector<int64_t>(32, 1)), ContainsText("got other bytes"));
}

}  // namespace
