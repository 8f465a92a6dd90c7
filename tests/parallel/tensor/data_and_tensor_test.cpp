// DistributedDataParallel over the replicas of a model that is cut, beside one process with the
// whole model and the whole batch.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/tensor/cut_model.h"
#include "support/ranks.h"
#include "support/recording_backend.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr int64_t kSamples = 4;  // of the whole batch

/// How both train.
struct Training {
  Cut cut = {};
  int64_t steps = 5;
  int64_t micro_batches = 1;
  double max_norm = 0;  // 0: no clipping
  bool clips_by_mesh = false;
  int zero = 0;  // stage of a ZeroRedundancyOptimizer, by which it clips; 0: SGD
};

/// What a rank finds after training.
struct Outcome {
  double distance = 1e300;      // of its parameters from the whole model's
  double norm_distance = 0;     // of the gradients' norms
  bool equal_over_dp = false;   // to the bit
  bool equal_over_tp = false;   // what is not cut
  double largest_gradient = 0;  // of the last step
};

torch::optim::SGD make_optimizer(const torch::nn::Module& model) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

// Returns the gradients' norms.
std::vector<double> train_whole(WholeModel& whole, const Training& training) {
  auto optimizer = make_optimizer(*whole);
  std::vector<double> norms;
  for (int64_t step = 0; step < training.steps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < training.micro_batches; ++micro) {
      const auto loss = whole->loss(tokens_of(step * 10 + micro, kSamples));
      (loss / training.micro_batches).backward();
    }
    if (training.max_norm > 0) {
      norms.push_back(torch::nn::utils::clip_grad_norm_(whole->parameters(), training.max_norm));
    }
    optimizer.step();
  }
  return norms;
}

/// One rank of a mesh of replicas and of their parts.
struct CutRun {
  CutRun(const Rank& self, const WholeModel& whole, const Cut& cut, int zero = 0)
      : mesh(ddp::init_device_mesh({2, self.size / 2}, {"dp", "tp"}, self.group)),
        tp(mesh.group("tp")),
        dp(mesh.group("dp")),
        model(
            CutModel(whole, tp, cut),
            ddp::DistributedDataParallelOptions().process_group(dp).bucket_cap_mb(0.001)),
        optimizer(make_optimizer(*model)) {
    if (zero == 0) return;
    sharded = std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::SGD>>(
        model, torch::optim::SGDOptions(0.1).momentum(0.9), ddp::ZeroOptions().stage(zero));
  }

  torch::Tensor own_tokens(int64_t batch) const {
    return tokens_of(batch, kSamples).chunk(2, 1)[static_cast<size_t>(dp->getRank())];
  }

  void backward(int64_t step, int64_t micro_batches) {
    const auto backward_of = [&](int64_t micro) {
      (model->forward(own_tokens(step * 10 + micro)) / micro_batches).backward();
    };
    for (int64_t micro = 0; micro + 1 < micro_batches; ++micro) {
      const auto guard = model->no_sync();
      backward_of(micro);
    }
    backward_of(micro_batches - 1);
  }

  ddp::DeviceMesh mesh;
  ddp::ProcessGroup tp, dp;
  ddp::DistributedDataParallel<CutModel> model;
  torch::optim::SGD optimizer;
  std::unique_ptr<torch::optim::Optimizer> sharded;  // in its place
};

double clip(CutRun& run, const Training& training) {
  if (run.sharded) return ddp::clip_grad_norm_(*run.sharded, training.max_norm);
  return training.clips_by_mesh ? ddp::clip_grad_norm_(*run.model, training.max_norm, run.mesh)
                                : ddp::clip_grad_norm_(*run.model, training.max_norm);
}

Outcome train_cut(
    const Rank& self, const WholeModel& start, const WholeModel& trained,
    const std::vector<double>& norms, const Training& training) {
  CutRun run(self, start, training.cut, training.zero);
  auto& optimizer = run.sharded ? *run.sharded : run.optimizer;
  Outcome outcome;
  for (int64_t step = 0; step < training.steps; ++step) {
    ddp::zero_grad(optimizer);
    run.backward(step, training.micro_batches);
    if (training.max_norm > 0) {
      const auto norm = clip(run, training);
      const auto expected = norms[static_cast<size_t>(step)];
      outcome.norm_distance = std::max(outcome.norm_distance, std::abs(norm - expected));
    }
    optimizer.step();
  }
  run.model->check_replicas({&optimizer});
  outcome.distance = distance_from_whole(*run.model, trained);
  outcome.equal_over_dp = ddp::replicas_equal(*run.model, run.dp);
  outcome.equal_over_tp = ddp::replicas_equal(*run.model, run.tp);
  for (const auto& p : run.model->parameters()) {
    if (training.zero == 2) break;  // they have none
    outcome.largest_gradient =
        std::max(outcome.largest_gradient, p.grad().abs().max().item<double>());
  }
  return outcome;
}

std::vector<Outcome> compare(const Training& training, int ranks = 4) {
  const WholeModel start;
  WholeModel trained;
  const auto norms = train_whole(trained, training);
  return run_ranks<Outcome>(
      ranks, [&](const Rank& self) { return train_cut(self, start, trained, norms, training); });
}

void check_equal(const std::vector<Outcome>& outcomes, bool has_gradients = true) {
  for (const auto& outcome : outcomes) {
    CHECK(outcome.distance < 1e-12);
    CHECK(outcome.norm_distance < 1e-12);
    CHECK(outcome.equal_over_dp);
    CHECK(outcome.equal_over_tp);
    // So that the comparison means something.
    if (has_gradients) CHECK(outcome.largest_gradient > 1e-3);
  }
}

}  // namespace

TEST_CASE("a wrapper's clone sums the gradients of what was marked", "[ranks][tensor]") {
  const auto gradients = run_ranks<at::Tensor>(2, [](const Rank& self) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({3}));
    ddp::mark_replicated_partial(*norm, self.group);
    const auto alone = ddp::split_group(self.rank, 0, self.group);
    ddp::DistributedDataParallel model(
        norm, ddp::DistributedDataParallelOptions().process_group(alone));
    const auto copy = std::dynamic_pointer_cast<torch::nn::LayerNormImpl>(model->clone());
    const auto x = torch::tensor({{1.0F, 2.0F, 4.0F}}) * (self.rank + 1);
    (copy->forward(x) * (self.rank + 1)).sum().backward();
    return copy->bias.grad();
  });
  for (const auto& gradient : gradients) CHECK(gradient.equal(torch::full({3}, 3.0F)));
}

TEST_CASE("replicas of a cut model train as one process", "[parallel][dp_tp][ranks]") {
  Training training;
  training.cut.sequence_parallel = GENERATE(false, true);
  training.cut.recomputes_block = GENERATE(false, true);
  training.micro_batches = GENERATE(1, 3);
  CAPTURE(training.cut.sequence_parallel, training.cut.recomputes_block, training.micro_batches);
  check_equal(compare(training));
}

TEST_CASE("clipping a cut model is clipping the whole one", "[parallel][dp_tp][ranks]") {
  Training training;
  training.cut.sequence_parallel = GENERATE(false, true);
  training.clips_by_mesh = GENERATE(false, true);
  training.max_norm = 0.05;  // far below the gradients' norms
  CAPTURE(training.cut.sequence_parallel, training.clips_by_mesh);
  check_equal(compare(training));
}

TEST_CASE("a sharded optimizer of a cut model clips the whole one", "[parallel][dp_tp][ranks]") {
  Training training;
  training.zero = GENERATE(1, 2);
  training.cut.sequence_parallel = GENERATE(false, true);
  training.micro_batches = GENERATE(1, 3);
  training.max_norm = 0.05;
  CAPTURE(training.zero, training.cut.sequence_parallel, training.micro_batches);
  check_equal(compare(training), /*has_gradients=*/training.zero == 1);
}

TEST_CASE("replicas of a model that is cut in four train alike", "[parallel][dp_tp][ranks][many]") {
  Training training;
  training.max_norm = 0.05;
  training.cut.sequence_parallel = GENERATE(false, true);
  check_equal(compare(training, 8));
}

TEST_CASE("replicas stay equal to the bit over many steps", "[parallel][dp_tp][ranks]") {
  Training training;
  training.cut.sequence_parallel = true;
  training.steps = 20;
  training.cut.marks_norms = GENERATE(true, false);
  const auto outcomes = compare(training);
  for (const auto& outcome : outcomes) {
    CHECK(outcome.equal_over_dp);
    // A norm that is not marked gets a part of its gradient on each rank.
    CHECK(outcome.equal_over_tp == training.cut.marks_norms);
    CHECK((outcome.distance < 1e-10) == training.cut.marks_norms);
  }
}

TEST_CASE("a step that overflows on one part is skipped on all", "[parallel][dp_tp][ranks]") {
  const bool names_groups = GENERATE(true, false);
  const WholeModel start;
  const int64_t steps = 4, overflow_in = 1;
  // One process leaves out that step.
  WholeModel trained;
  {
    auto optimizer = make_optimizer(*trained);
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      trained->loss(tokens_of(step * 10, kSamples)).backward();
      if (step != overflow_in) optimizer.step();
    }
  }
  struct Scaled {
    std::vector<bool> stepped;
    double scale = 0, distance = 0;
    bool equal_over_tp = false;
  };
  const auto outcomes = run_ranks<Scaled>(4, [&](const Rank& self) {
    CutRun run(self, start, {});
    std::vector<ddp::ProcessGroup> groups;
    if (names_groups) groups.push_back(run.tp);
    ddp::GradScaler scaler(ddp::GradScalerOptions().init_scale(1024).found_inf_groups(groups));
    Scaled outcome;
    for (int64_t step = 0; step < steps; ++step) {
      run.optimizer.zero_grad();
      auto loss = scaler.scale(run.model->forward(run.own_tokens(step * 10)));
      loss.backward();
      if (step == overflow_in && run.tp->getRank() == 1) {
        run.model->module()->up->weight.mutable_grad()[0][0] =
            std::numeric_limits<double>::infinity();
      }
      outcome.stepped.push_back(scaler.step(run.optimizer));
      scaler.update();
    }
    outcome.scale = scaler.get_scale();
    outcome.distance = distance_from_whole(*run.model, trained);
    outcome.equal_over_tp = ddp::replicas_equal(*run.model, run.tp);
    return outcome;
  });
  for (int rank = 0; rank < 4; ++rank) {
    const auto& outcome = outcomes[static_cast<size_t>(rank)];
    // Without the groups the rank of the other part does not know.
    const bool skips = names_groups || rank % 2 == 1;
    CHECK(outcome.stepped == std::vector<bool>{true, !skips, true, true});
    CHECK(outcome.scale == (skips ? 512 : 1024));
    CHECK(outcome.equal_over_tp == names_groups);
    if (names_groups) CHECK(outcome.distance < 1e-12);
  }
}

TEST_CASE("a cut model computes in 16 bits as the whole one", "[parallel][dp_tp][ranks]") {
  const bool sequence = GENERATE(false, true), recomputes = GENERATE(false, true);
  WholeModel whole;
  whole->to(torch::kFloat);
  const auto tokens = tokens_of(3, kSamples);
  const auto loss = whole->loss(tokens);
  loss.backward();
  struct Low {
    double loss = 0, gradients = 0;
    bool are_float = false, equal_over_tp = false;
  };
  const auto outcomes = run_ranks<Low>(4, [&](const Rank& self) {
    CutRun run(self, whole, {sequence, true, recomputes});
    torch::Tensor own;
    {
      const ddp::AutocastGuard autocast(torch::kCPU);
      own = run.model->forward(run.own_tokens(3));
    }
    own.backward();
    Low low;
    low.loss = ddp::average(own.item<double>(), run.dp);
    low.gradients = distance_from_whole(*run.model, whole, /*of_gradients=*/true);
    low.are_float = own.scalar_type() == torch::kFloat;
    for (const auto& p : run.model->parameters()) {
      low.are_float = low.are_float && p.grad().scalar_type() == torch::kFloat;
    }
    run.optimizer.step();
    low.equal_over_tp = ddp::replicas_equal(*run.model, run.tp);
    return low;
  });
  for (const auto& low : outcomes) {
    // bfloat16 has 8 bits: of a loss of about 2, and of gradients of about 0.1.
    CHECK(low.loss == Approx(loss.item<double>()).epsilon(1e-2));
    CHECK(low.gradients < 1e-2);
    CHECK(low.gradients > 0);
    CHECK(low.are_float);
    CHECK(low.equal_over_tp);
  }
}

TEST_CASE("a block sends two sums each way, and a loss two forward", "[parallel][dp_tp]") {
  Events events;
  const auto tp = recording_group(0, 2, events);
  const WholeModel whole;
  CutModel model(whole, tp);
  const auto sent_by = [&](const std::function<void()>& call) {
    events.clear();
    call();
    return events;
  };
  torch::Tensor y, loss;
  const auto x = draw_values({kTime, 2, kWidth}, 1).requires_grad_();
  const std::string activations = "allreduce " + std::to_string(kTime * 2 * kWidth);
  CHECK(sent_by([&] { y = model->block(x); }) == Events{activations, activations});
  CHECK(sent_by([&] { y.sum().backward(); }) == Events{activations, activations});
  const auto logits = draw_values({kTime, 2, 4}, 2).requires_grad_();
  const auto target = torch::ones({kTime, 2}, torch::kLong);
  CHECK(
      sent_by([&] { loss = ddp::vocab_parallel_cross_entropy(logits, target, tp); }) ==
      Events{"allreduce " + std::to_string(kTime * 2), "allreduce " + std::to_string(kTime * 4)});
  CHECK(sent_by([&] { loss.backward(); }).empty());
}
