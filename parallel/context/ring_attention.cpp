#include <cmath>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/context_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/sample_weight.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "context/attention_parts.h"

namespace ddp::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRing = "ring";

/// How a block of queries attends to a block of keys.
struct BlockOptions {
  bool is_causal = false;  // as many queries as keys; each attends to those up to its own index
  double scale = 1;        // of the scores
};

/// The output as if there were no other keys, and the logarithm of the sum of the exponentials of
/// the scores, by which outputs of several blocks are weighted.
struct BlockOutput {
  at::Tensor output;   // [N, heads, queries, d]
  at::Tensor log_sum;  // [N, heads, queries], float32 or float64
};

constexpr double kNoDropout = 0;

/// \param q, k, v  [N, heads, queries or keys, d], on a CPU; the last dimension is contiguous.
BlockOutput attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockOptions& options) {
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, kNoDropout, options.is_causal, /*attn_mask=*/{}, options.scale);
  return {output, log_sum};
}

struct BlockGradients {
  at::Tensor q, k, v;
};

/// The part of the gradients that is due to a block of keys.
///
/// \param gradient, whole  of the output, and the output, to all keys.
BlockGradients attend_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const BlockOutput& whole, const BlockOptions& options) {
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, q, k, v, whole.output, whole.log_sum, kNoDropout, options.is_causal,
      /*attn_mask=*/{}, options.scale);
  return {of_q, of_k, of_v};
}

/// The ranks in a ring, and how their positions attend to each other.
struct Ring : torch::CustomClassHolder {
  Ring(ProcessGroup group, const BlockOptions& options)
      : group(std::move(group)), options(options) {}

  int rank() const { return group->getRank(); }
  int size() const { return group->getSize(); }
  int next() const { return (rank() + 1) % size(); }
  int previous() const { return (rank() + size() - 1) % size(); }
  /// The rank whose keys this rank has after so many messages.
  int owner(int step) const { return (rank() + size() - step) % size(); }

  ProcessGroup group;
  BlockOptions options;
};

/// Which queries of this rank attend to which keys of another one: all, or one half each.
struct Block {
  bool later_queries = false;  // the second half alone
  bool earlier_keys = false;   // the first half alone
  bool is_causal = false;

  at::Tensor queries(const at::Tensor& t, int64_t dim = -2) const {
    return later_queries ? t.chunk(2, dim)[1] : t;
  }
  at::Tensor keys(const at::Tensor& t) const { return earlier_keys ? t.chunk(2, -2)[0] : t; }
};

// A rank's first half lies before the second half of every rank, and before the first halves of
// the ranks after it; its second half before the second halves of the ranks before it.
Block block_of(const Ring& ring, int owner) {
  Block block;
  if (!ring.options.is_causal) return block;
  block.is_causal = owner == ring.rank();
  block.later_queries = owner > ring.rank();
  block.earlier_keys = owner < ring.rank();
  return block;
}

/// A message to the next rank and one from the previous, of equal sizes, under way.
class Shift {
 public:
  Shift(const at::Tensor& sent, const Ring& ring, int tag)
      : sent_(sent.contiguous()), received_(at::empty_like(sent_)) {
    const EqualMessages equal(received_, sent_);
    works_.push_back(ddp::send_async(sent_, ring.next(), tag, ring.group));
    works_.push_back(ddp::recv_async(received_, ring.previous(), tag, ring.group));
  }
  at::Tensor wait() {
    for (const auto& work : works_) work->wait();
    works_.clear();
    return received_;
  }

 private:
  at::Tensor sent_, received_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

enum Tag { kKeysAndValues, kGradients };

/// Weights what some queries got from other keys by their sums.
void merge(const BlockOutput& other, const BlockOutput& into) {
  const auto sum = at::logaddexp(into.log_sum, other.log_sum);
  into.output.mul_((into.log_sum - sum).exp_().unsqueeze(-1));
  into.output.add_(other.output * (other.log_sum - sum).exp_().unsqueeze(-1));
  into.log_sum.copy_(sum);
}

BlockOutput ring_forward(
    const Ring& ring, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  auto keys_and_values = at::stack({k, v});
  BlockOutput whole;
  for (int step = 0; step < ring.size(); ++step) {
    std::optional<Shift> shift;
    if (step + 1 < ring.size()) shift.emplace(keys_and_values, ring, kKeysAndValues);
    const auto block = block_of(ring, ring.owner(step));
    auto options = ring.options;
    options.is_causal = block.is_causal;
    const auto own = attend(
        block.queries(q), block.keys(keys_and_values[0]), block.keys(keys_and_values[1]), options);
    if (step == 0) {
      whole = {own.output.to(at::toOpMathType(q.scalar_type())).clone(), own.log_sum.clone()};
    } else {
      merge(own, {block.queries(whole.output), block.queries(whole.log_sum, -1)});
    }
    if (shift) keys_and_values = shift->wait();
  }
  return {whole.output.to(q.scalar_type()), whole.log_sum};
}

variable_list ring_backward(
    const Ring& ring, const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const BlockOutput& whole) {
  const auto dtype = at::toOpMathType(q.scalar_type());
  auto of_queries = at::zeros(q.sizes(), q.options().dtype(dtype));
  auto keys_and_values = at::stack({k, v});
  // Gradients of the keys and values that this rank has now, summed over the ranks so far.
  at::Tensor of_keys_and_values;
  std::optional<Shift> gradients;
  for (int step = 0; step < ring.size(); ++step) {
    std::optional<Shift> shift;
    if (step + 1 < ring.size()) shift.emplace(keys_and_values, ring, kKeysAndValues);
    const auto block = block_of(ring, ring.owner(step));
    auto options = ring.options;
    options.is_causal = block.is_causal;
    const auto own = attend_backward(
        block.queries(gradient), block.queries(q), block.keys(keys_and_values[0]),
        block.keys(keys_and_values[1]),
        {block.queries(whole.output), block.queries(whole.log_sum, -1)}, options);
    block.queries(of_queries).add_(own.q);
    of_keys_and_values =
        gradients ? gradients->wait()
                  : at::zeros(keys_and_values.sizes(), keys_and_values.options().dtype(dtype));
    block.keys(of_keys_and_values[0]).add_(own.k);
    block.keys(of_keys_and_values[1]).add_(own.v);
    gradients.emplace(of_keys_and_values, ring, kGradients);
    if (shift) keys_and_values = shift->wait();
  }
  of_keys_and_values = gradients->wait();  // after W messages those of this rank's own
  const auto type = q.scalar_type();
  return {of_queries.to(type), of_keys_and_values[0].to(type), of_keys_and_values[1].to(type)};
}

class RingAttention : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const c10::intrusive_ptr<Ring>& ring) {
    const auto whole = ring_forward(*ring, q, k, v);
    context->save_for_backward({q, k, v, whole.output, whole.log_sum});
    context->saved_data[kRing] = c10::IValue::make_capsule(ring);
    return whole.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto ring =
        c10::static_intrusive_pointer_cast<Ring>(context->saved_data[kRing].toCapsule());
    DDP_CHECK(
        !c10::GradMode::is_enabled(),
        "ring_attention: expected a backward pass without create_graph, got one with it ",
        on_rank_text(*ring->group), ". Use all_to_all_attention, which has second derivatives.");
    const auto saved = context->get_saved_variables();
    const double weight = sample_weight();
    const auto gradient = (weight == 1 ? gradients[0] : gradients[0] * weight).contiguous();
    auto result =
        ring_backward(*ring, gradient, saved[0], saved[1], saved[2], {saved[3], saved[4]});
    if (weight != 1) {
      for (auto& of_input : result) of_input.div_(weight);
    }
    result.emplace_back();
    return result;
  }
};

}  // namespace

at::Tensor ring_attention(
    const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v,
    const GroupArg& group_arg, bool is_causal, std::optional<double> scale) {
  const auto group = group_arg.get();
  const auto [q, k, v] = attention_arguments("ring_attention", given_q, given_k, given_v, *group);
  DDP_CHECK_VALUE(
      q.is_cpu(), "ring_attention: expected tensors of a CPU, got some on ", q.device(), " ",
      on_rank_text(*group), ". Use all_to_all_attention.");
  if (group->getSize() == 1) return whole_attention(q, k, v, is_causal, scale);
  DDP_CHECK_VALUE(
      !is_causal || q.size(-2) % 2 == 0,
      "ring_attention: expected an even number of positions, two pieces of context_shard(), got ",
      q.sizes(), " ", on_rank_text(*group), ". Cut with it.");
  const BlockOptions options{
      is_causal, scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))};
  const bool makes_node =
      c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  record_differentiable_call(group, q, makes_node);
  return RingAttention::apply(q.contiguous(), k, v, c10::make_intrusive<Ring>(group, options));
}

}  // namespace ddp::functional
