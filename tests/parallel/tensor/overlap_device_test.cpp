// Order of what a cut layer's backward pass does on a device, on which nothing runs before it is
// waited for. The other rank of its group has what this one has.
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/record_function.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp::testing {
namespace {

using torch::Tensor;

/// How much the stream of collectives has to do when a product of matrices is launched.
std::vector<size_t>& on_its_way() {
  static auto* const list = new std::vector<size_t>();
  return *list;
}

std::unique_ptr<at::ObserverContext> note_product(const at::RecordFunction& function) {
  // The device's own call of mm.out has three inputs.
  const bool is_product =
      std::string(function.name()) == "aten::mm" && function.inputs().size() == 2;
  if (!is_product || !function.inputs()[0].toTensor().is_privateuseone()) return nullptr;
  auto& device = toy::Device::get();
  const std::lock_guard lock(device.mutex);
  on_its_way().push_back(device.streams[{0, toy::kEchoStream}].queued.size());
  return nullptr;
}

/// While it lives, products are noted.
class Noting {
 public:
  Noting() {
    on_its_way().clear();
    const auto callback = at::RecordFunctionCallback(&note_product).needsInputs(true);
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(callback).scopes({at::RecordScope::FUNCTION}));
  }
  ~Noting() { at::removeCallback(handle_); }
  Noting(const Noting&) = delete;
  Noting& operator=(const Noting&) = delete;

 private:
  at::CallbackHandle handle_{};
};

struct Run {
  std::vector<Tensor> results;     // on the host: output, gradients of input, weight and bias
  std::vector<size_t> on_its_way;  // at each product of the backward pass
  int host_waits = 0;              // in the backward pass
};

Run run_on(c10::Device where, bool sequence, bool trains_weight) {
  const auto group = toy::echo_group();
  ColumnParallelLinear layer(
      ColumnParallelLinearOptions(12, 16).sequence_parallel(sequence).process_group(group),
      draw_values({16, 12}, 1), draw_values({16}, 2));
  layer->to(where);
  layer->weight.requires_grad_(trains_weight);
  const auto x = draw_values({6, 12}, 3).to(where).requires_grad_();
  const auto y = layer->forward(x);
  const auto loss = (y * y).sum();
  toy::Device::get().forget();
  Run run;
  {
    const Noting noting;
    loss.backward();
    run.on_its_way = on_its_way();
    run.host_waits = toy::Device::get().host_waits;
  }
  for (const auto& t : {y, x.grad(), layer->weight.grad(), layer->bias.grad()}) {
    run.results.push_back(t.defined() ? t.detach().cpu() : t);
  }
  return run;
}

}  // namespace

TEST_CASE("a cut layer's gradient is on its way while the weight's is launched", "[streams]") {
  const bool sequence = GENERATE(false, true), trains_weight = GENERATE(true, false);
  CAPTURE(sequence, trains_weight);
  const auto run = run_on(c10::Device(at::kPrivateUse1, 0), sequence, trains_weight);
  // A sum is one piece of work, the others copy twice, or copy and sum.
  const size_t gather = sequence && trains_weight ? 2 : 0, reduction = sequence ? 2 : 1;
  CHECK(
      run.on_its_way ==
      (trains_weight ? std::vector<size_t>{gather, reduction} : std::vector<size_t>{gather}));
  CHECK(run.host_waits == 0);

  const auto expected = run_on(at::kCPU, sequence, trains_weight).results;
  for (size_t i = 0; i < expected.size(); ++i) {
    REQUIRE(run.results[i].defined() == expected[i].defined());
    if (expected[i].defined()) CHECK(run.results[i].equal(expected[i]));
  }
}

}  // namespace ddp::testing
