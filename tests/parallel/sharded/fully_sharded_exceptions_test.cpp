// What the other ranks read when a pass of a sharded model throws on one, and when one evaluates
// alone.
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/sharded/sharded_net.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

/// A function of a loss, whose backward throws.
struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
    throw std::runtime_error("boom");
  }
};

enum class Where { Forward, OutputHook, LossFunction, InputHook };
enum class Then { Ends, Waits, GoesOn };

/// A step whose pass throws there.
void throw_in_step(NetRun& run, Where where) {
  const auto explode = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("boom"); };
  auto x = net_input(run.use, 0, 0, run.rank).requires_grad_() * 1;
  if (where == Where::Forward) x = x.narrow(1, 0, 1);
  if (where == Where::InputHook) x.register_hook(explode);
  auto loss = run.model->forward(x, run.rank);
  if (where == Where::OutputHook) loss.register_hook(explode);
  if (where == Where::LossFunction) loss = ThrowsInBackward::apply(loss);
  loss.backward();
}

}  // namespace

TEST_CASE(
    "a pass that throws on a rank ends the others with its cause", "[ranks][sharded][errors]") {
  const auto where =
      GENERATE(Where::Forward, Where::OutputHook, Where::LossFunction, Where::InputHook);
  const auto then = GENERATE(Then::Ends, Then::Waits, Then::GoesOn);
  const int ranks = GENERATE(2, 3);
  CAPTURE(static_cast<int>(where), static_cast<int>(then));
  const auto errors = run_ranks<TimedError>(ranks, kLongTimeout, [&](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(0).backward();
    return timed_error_of([&] {
      if (self.rank != 1) return run.loss(1).backward(), run.loss(2).backward();
      if (then == Then::Ends) return throw_in_step(run, where);
      TORCH_CHECK(!error_of([&] { throw_in_step(run, where); }).empty());
      if (then == Then::GoesOn) return run.loss(2).backward();
      self.wait_until_others_end();
    });
  });
  const bool is_forward = where == Where::Forward;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == 1 && then != Then::GoesOn) continue;
    const auto& [error, seconds] = errors[static_cast<size_t>(rank)];
    CAPTURE(rank);
    CHECK_THAT(error, ContainsText(is_forward ? "forward of a sharded" : "backward of a sharded"));
    CHECK_THAT(error, ContainsText(is_forward ? "mat1 and mat2" : "boom"));
    CHECK(seconds < 10);
  }
}

TEST_CASE("a pass that throws on all ranks may be followed by others", "[ranks][sharded][errors]") {
  const auto where =
      GENERATE(Where::Forward, Where::OutputHook, Where::LossFunction, Where::InputHook);
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    NetRun run(self, over(self));
    for (int i = 0; i < 2; ++i) {
      TORCH_CHECK(!error_of([&] { throw_in_step(run, where); }).empty());
      run.loss(i).backward();
    }
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a rank that evaluates alone reads that all ranks have to", "[ranks][sharded][errors]") {
  using Other = void (*)(NetRun&, const Rank&);
  const Other train = [](NetRun& run, const Rank&) { run.loss(1).backward(); };
  const Other clip = [](NetRun& run, const Rank&) { ddp::clip_grad_norm_(*run.model, 1.0); };
  const Other save = [](NetRun& run, const Rank& self) {
    (void)ddp::full_state_dict(*run.model, 0, self.group);
  };
  const Other wait = [](NetRun&, const Rank& self) { ddp::barrier(self.group); };
  const Other end = [](NetRun&, const Rank&) {};
  const auto other = GENERATE_COPY(train, clip, save, wait, end);
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    NetRun run(self, over(self));
    run.loss(0).backward();
    if (self.rank == 1) return other(run, self);
    const torch::NoGradGuard no_grad;
    run.loss(1);
  });
  CHECK_THAT(errors[0], ContainsText("collective"));
  CHECK_THAT(errors[0], ContainsText("evaluation"));
  if (other == end) return;
  CHECK_THAT(errors[1], ContainsText("evaluation"));
}
