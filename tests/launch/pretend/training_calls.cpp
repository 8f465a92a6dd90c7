#include "launch/pretend/training_calls.h"

#include <utility>

namespace ddp::testing {
namespace {

constexpr int64_t kActivations = 4096, kWeights = 8192;

/// A rank of stage p, replica d, and part t of each layer.
class TrainingRank {
 public:
  TrainingRank(const Training& training, int rank)
      : training_(training),
        rank_(rank),
        t_(rank % training.tp),
        d_(rank / training.tp % training.dp),
        p_(rank / training.tp / training.dp),
        calls_(rank, training.size()) {}

  WrittenCalls run() {
    make_groups();
    const int root = makes(Mistake::OtherRoot) ? 1 : 0;
    calls_.call_and_wait(dp_, "broadcast", kWeights, "parameters", root);
    const int steps = training_.steps + (makes(Mistake::ExtraStep) ? 1 : 0);
    for (step_ = 0; step_ < steps; ++step_) run_step();
    calls_.call_and_wait(world_, "barrier", 0, "the end");
    return calls_;
  }

 private:
  /// Whether this rank makes the mistake, which comes in the second step.
  bool makes(Mistake mistake) const {
    return training_.mistake == mistake && training_.faulty == rank_;
  }
  bool makes_now(Mistake mistake) const { return makes(mistake) && step_ == 1; }
  bool is_last_step() const { return step_ + 1 == training_.steps; }

  int rank_at(int p, int d, int t) const { return (p * training_.dp + d) * training_.tp + t; }
  bool is_first() const { return p_ == 0; }
  bool is_last() const { return p_ + 1 == training_.pp; }

  void make_groups() {
    std::vector<int> all, tp, dp, pp;
    for (int rank = 0; rank < training_.size(); ++rank) all.push_back(rank);
    for (int t = 0; t < training_.tp; ++t) tp.push_back(rank_at(p_, d_, t));
    for (int d = 0; d < training_.dp; ++d) dp.push_back(rank_at(p_, d, t_));
    for (int p = 0; p < training_.pp; ++p) pp.push_back(rank_at(p, d_, t_));
    if (makes(Mistake::OtherGroups)) std::swap(dp[0], dp[1]);
    world_ = calls_.group("default_pg", "world", all);
    tp_ = calls_.group("mesh", "tp", tp);
    dp_ = calls_.group("mesh", "dp", dp);
    pp_ = calls_.group("mesh", "pp", pp);
    const bool has_tie = training_.tied && training_.pp > 1 && (is_first() || is_last());
    if (has_tie && !makes(Mistake::TieGroupMissing)) {
      tie_ = calls_.group("tie", "group", {pp.front(), pp.back()});
    }
  }

  void run_step() {
    calls_.step();
    const bool has_fewer = makes_now(Mistake::FewerMicrobatches);
    const int microbatches = training_.microbatches - (has_fewer ? 1 : 0);
    for (int m = 0; m < microbatches; ++m) forward();
    if (makes_now(Mistake::ExtraBarrier)) calls_.call_and_wait(world_, "barrier", 0, "a log");
    for (int m = 0; m < microbatches; ++m) backward();
    if (tie_ >= 0 && !makes_now(Mistake::TieOnOneStage)) {
      calls_.call_and_wait(tie_, "all_reduce", kWeights, "tied weight");
    }
    const auto clip = [&] { calls_.call_and_wait(world_, "all_reduce", 4, "clip_grad_norm_"); };
    if (makes_now(Mistake::SwappedGroups)) clip();
    reduce_gradients();
    if (!makes_now(Mistake::SwappedGroups)) clip();
    const bool is_odd = makes(Mistake::OddBatch) && is_last_step();
    calls_.call_and_wait(dp_, "all_gather", is_odd ? 12 : 32, "losses");
  }

  int64_t activations() const {
    const bool is_odd = makes(Mistake::OddMessages) && is_last_step();
    return is_odd ? kActivations / 2 : kActivations;
  }

  void message(const char* kind, int stage, const char* place) {
    calls_.call_and_wait(pp_, kind, activations(), place, stage);
  }

  void forward() {
    if (!is_first()) message("recv", p_ - 1, "forward");
    for (int layer = 0; layer < training_.layers; ++layer) {
      if (makes_now(Mistake::SkipsLayer) && layer == 1) continue;
      if (makes_now(Mistake::SkipsSum) && layer == 1) continue;
      sum_layer(layer, "forward of layer ");
    }
    if (!is_last()) {
      const bool is_wrong = makes_now(Mistake::WrongStage);
      message("send", is_wrong ? (p_ + 2) % training_.pp : p_ + 1, "forward");
    }
  }

  void backward() {
    if (!is_last() && !makes_now(Mistake::BothSend)) message("recv", p_ + 1, "backward");
    for (int layer = training_.layers - 1; layer >= 0; --layer) {
      if (makes_now(Mistake::SkipsLayer) && layer == 1) continue;
      sum_layer(layer, "backward of layer ");
    }
    if (makes_now(Mistake::BothSend)) {
      message("send", p_ + 1, "echo");
      message("recv", p_ + 1, "backward");
    }
    if (training_.mistake == Mistake::BothSend && step_ == 1 && echoes()) {
      message("send", p_ - 1, "backward");
      message("recv", p_ - 1, "echo");
    } else if (!is_first()) {
      message("send", p_ - 1, "backward");
    }
  }

  /// Whether the stage before this one is the faulty one.
  bool echoes() const { return !is_first() && rank_at(p_ - 1, d_, t_) == training_.faulty; }

  void sum_layer(int layer, const char* pass) {
    const bool is_cut_otherwise = makes_now(Mistake::SwappedSplit) && layer == 1;
    calls_.call_and_wait(
        tp_, "all_reduce", is_cut_otherwise ? kActivations / 4 : kActivations, str(pass, layer));
  }

  void reduce_gradients() {
    std::vector<int> order, works;
    for (int layer = training_.layers - 1; layer >= 0; --layer) order.push_back(layer);
    if (makes_now(Mistake::SwappedBuckets)) std::swap(order[0], order[1]);
    for (const int layer : order) {
      const bool is_second = layer == 1;
      if (is_second && (makes_now(Mistake::SkipsBucket) || makes_now(Mistake::SkipsLayer)))
        continue;
      const bool is_half = is_second && makes_now(Mistake::OtherDtype);
      const bool is_scattered = is_second && makes_now(Mistake::OtherKind);
      const bool is_elsewhere = is_second && makes_now(Mistake::WrongAxis);
      works.push_back(calls_.call(
          is_elsewhere ? tp_ : dp_, is_scattered ? "reduce_scatter" : "all_reduce",
          (is_half ? kWeights / 2 : kWeights) + 64 * layer, str("bucket of layer ", layer), -1,
          is_half ? "half" : "float"));
    }
    if (makes_now(Mistake::MissingWait)) works.erase(works.begin());
    for (const int work : works) calls_.wait(work);
  }

  const Training& training_;
  int rank_, t_, d_, p_;
  WrittenCalls calls_;
  int world_ = -1, tp_ = -1, dp_ = -1, pp_ = -1, tie_ = -1;
  int step_ = 0;
};

}  // namespace

WrittenCalls write_calls(const Training& training, int rank) {
  return TrainingRank(training, rank).run();
}

}  // namespace ddp::testing
