#include "state_tensors.h"

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace ddp {
namespace {

template <typename Moments>
StateParts parts_of_moments(Moments& state) {
  return {{&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}, &state.step()};
}

}  // namespace

StateParts parts_of(torch::optim::OptimizerParamState& state) {
  namespace optim = torch::optim;
  if (auto* s = dynamic_cast<optim::AdamParamState*>(&state)) return parts_of_moments(*s);
  if (auto* s = dynamic_cast<optim::AdamWParamState*>(&state)) return parts_of_moments(*s);
  if (auto* s = dynamic_cast<optim::SGDParamState*>(&state)) return {{&s->momentum_buffer()}};
  if (auto* s = dynamic_cast<optim::AdagradParamState*>(&state)) return {{&s->sum()}, &s->step()};
  auto* s = dynamic_cast<optim::RMSpropParamState*>(&state);
  TORCH_INTERNAL_ASSERT(s);
  return {{&s->square_avg(), &s->momentum_buffer(), &s->grad_avg()}, &s->step()};
}

}  // namespace ddp
