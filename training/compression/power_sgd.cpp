#include <ddp/power_sgd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/text.h>

#include "bucket_states.h"
#include "low_rank.h"

namespace ddp::hooks {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

void check_options(const PowerSGDOptions& options) {
  DDP_CHECK_VALUE(
      options.matrix_approximation_rank() >= 1,
      "PowerSGD: expected matrix_approximation_rank to be at least 1, got ",
      options.matrix_approximation_rank(), ". 1 to 4 is usual.");
  const bool keeps_state = options.use_error_feedback() || options.warm_start();
  DDP_CHECK_VALUE(
      options.start_iter() >= (keeps_state ? 2 : 0),
      "PowerSGD: expected start_iter to be at least 2 with use_error_feedback or warm_start, as "
      "buckets change after the first step, and never negative, got ",
      options.start_iter(), ". Name a later step.");
  DDP_CHECK_VALUE(
      options.min_compression_rate() > 0,
      "PowerSGD: expected min_compression_rate to be above 0, got ", options.min_compression_rate(),
      ". 2 is usual.");
  DDP_CHECK_VALUE(
      options.orthogonalization_epsilon() >= 0,
      "PowerSGD: expected orthogonalization_epsilon to be at least 0, got ",
      options.orthogonalization_epsilon(), ". Leave it at 0.");
  DDP_CHECK_VALUE(
      options.random_seed() >= 0 && options.random_seed() <= std::numeric_limits<uint32_t>::max(),
      "PowerSGD: expected random_seed to be within [0, 4294967295], got ", options.random_seed(),
      ". Name a smaller one.");
}

}  // namespace

class PowerSGD::Impl {
 public:
  Impl(const PowerSGDOptions& options, const GroupArg& group)
      : options_(options),
        group_(group),
        average_(all_reduce(group)),
        seeds_(static_cast<uint32_t>(options.random_seed())) {}

  void rebind(const ProcessGroup& group) {
    group_ = group;
    average_ = all_reduce(group);
  }

  // Only this function starts collectives, on the thread of the backward pass, and in one order:
  // the first of bucket i + 1, then the second of bucket i.
  FuturePtr reduce(GradBucket& bucket) {
    const bool is_last = bucket.is_last();
    const auto& buffer = bucket.buffer();
    if (bucket.index() == 0) pending_ = nullptr;  // of a pass that failed
    FuturePtr result;
    if (iteration_ < options_.start_iter() || buffer.is_sparse() || buffer.is_complex()) {
      result = average_(bucket);
    } else {
      auto flight = begin(bucket);
      result = flight->result;
      start_second_all_reduce();
      pending_ = std::move(flight);
    }
    if (is_last) {
      start_second_all_reduce();
      ++iteration_;
      states_.end_pass();
    }
    return result;
  }

  const CompressionStats& stats() const { return stats_; }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("iteration", c10::IValue(iteration_));
    archive.write("drawn", c10::IValue(seeds_.drawn()));
    archive.write("numel_before", c10::IValue(stats_.numel_before));
    archive.write("numel_after", c10::IValue(stats_.numel_after));
    c10::impl::GenericDict buckets(c10::StringType::get(), c10::TensorType::get());
    states_.for_each([&](const std::string& name, BucketState& state) {
      for (const auto& [part, tensor] : named_tensors(state)) {
        if (tensor->defined()) buckets.insert(name + part, *tensor);
      }
    });
    archive.write("buckets", c10::IValue(buckets));
  }

  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      c10::IValue value;
      archive.read(key, value);
      return value;
    };
    const auto iteration = read("iteration").toInt();
    const auto drawn = read("drawn").toInt();
    const CompressionStats stats{read("numel_before").toInt(), read("numel_after").toInt()};
    const auto saved = read("buckets").toGenericDict();
    std::map<std::string, std::shared_ptr<BucketState>> buckets;
    for (const auto& entry : saved) {
      const auto& key = entry.key().toStringRef();
      DDP_CHECK(
          key.size() > kPartLength, "PowerSGD: expected the name of a bucket, got \"", key,
          "\". Load what save() wrote.");
      auto& state = buckets[key.substr(0, key.size() - kPartLength)];
      if (!state) state = std::make_shared<BucketState>();
      for (const auto& [part, tensor] : named_tensors(*state)) {
        if (key.compare(key.size() - kPartLength, kPartLength, part) == 0) {
          *tensor = entry.value().toTensor().clone();
        }
      }
    }
    iteration_ = iteration;
    seeds_.restore(drawn);
    stats_ = stats;
    states_.assign(std::move(buckets));
  }

 private:
  // The state that a bucket keeps from one step to the next; updated only where the reduced values
  // are finite.
  struct BucketState {
    at::Tensor error;  // with use_error_feedback
    at::Tensor qs;
  };

  // Gradients of one shape that are approximated together.
  struct Batch {
    std::vector<at::Tensor> matrices;  // views of the bucket
    at::Tensor stacked = {};           // [batch, n, m]: a view of one matrix, or a copy of many
    at::Tensor p = {};                 // [batch, n, r], a view of InFlightBucket::ps
    at::Tensor q = {};                 // [batch, m, r], a view of InFlightBucket::qs
    at::Tensor kept_q = {};            // [batch, m, r], a view of BucketState::qs
  };

  // A bucket that is being reduced. Its buffer holds the gradients plus the error of earlier steps,
  // and at the end their approximation.
  struct InFlightBucket {
    std::shared_ptr<BucketState> state;
    at::Tensor buffer;
    std::vector<at::Tensor> whole;
    at::Tensor whole_together;
    std::vector<Batch> batches;
    at::Tensor ps;
    at::Tensor qs;
    at::Tensor is_finite;  // whether the reduced values are; the same on all ranks
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    FuturePtr result;
  };

  using InFlightBucketPtr = std::shared_ptr<InFlightBucket>;

  static constexpr size_t kPartLength = 2;

  static std::vector<std::pair<std::string, at::Tensor*>> named_tensors(BucketState& state) {
    return {{".e", &state.error}, {".q", &state.qs}};
  }

  int64_t rank_of(int64_t n, int64_t m) const {
    return std::min({n, m, options_.matrix_approximation_rank()});
  }

  bool shrinks_enough(const at::Tensor& matrix) const {
    if (!matrix.defined()) return false;
    const auto n = matrix.size(0);
    const auto m = matrix.size(1);
    const auto compressed = static_cast<double>((n + m) * rank_of(n, m));
    return compressed * options_.min_compression_rate() < static_cast<double>(n * m);
  }

  InFlightBucketPtr begin(GradBucket& bucket) {
    auto flight = std::make_shared<InFlightBucket>();
    flight->buffer = bucket.buffer();
    const auto device = flight->buffer.device();
    flight->result = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(),
        device.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device});
    const auto state = states_.of(bucket);
    flight->state = state;
    if (options_.use_error_feedback()) add_error(flight->buffer, *state);
    split_gradients(*flight, bucket.gradients());
    compute_p(*flight);
    start_all_reduce(*flight, flight->whole_together);
    if (!flight->batches.empty()) start_all_reduce(*flight, flight->ps);
    return flight;
  }

  // The error is not updated until the reduced values are known to be finite.
  static void add_error(const at::Tensor& buffer, BucketState& state) {
    if (!state.error.defined()) {
      state.error = at::zeros_like(buffer);
      return;
    }
    state.error = state.error.to(buffer.device());
    buffer.add_(state.error);
  }

  // Splits the gradients: those to compress, grouped by shape, and those to average whole.
  void split_gradients(InFlightBucket& flight, const std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> flat;
    std::vector<std::vector<at::Tensor>> shapes;
    for (const auto& gradient : gradients) {
      const auto matrix = as_matrix(gradient);
      stats_.numel_before += gradient.numel();
      if (!shrinks_enough(matrix)) {
        stats_.numel_after += gradient.numel();
        flight.whole.push_back(gradient);
        flat.push_back(gradient.reshape({-1}));
        continue;
      }
      const auto n = matrix.size(0);
      const auto m = matrix.size(1);
      stats_.numel_after += (n + m) * rank_of(n, m);
      const auto is_same = [&](const auto& others) {
        return others.front().sizes() == matrix.sizes();
      };
      const auto same = std::find_if(shapes.begin(), shapes.end(), is_same);
      if (same == shapes.end()) {
        shapes.push_back({matrix});
      } else {
        same->push_back(matrix);
      }
    }
    if (!flat.empty()) flight.whole_together = at::cat(flat);
    for (auto& matrices : shapes) {
      for (auto& matrix : matrices) {
        const bool joins = options_.batch_tensors_with_same_shape() && &matrix != &matrices.front();
        auto& batch = joins ? flight.batches.back() : flight.batches.emplace_back();
        batch.matrices.push_back(std::move(matrix));
      }
    }
  }

  // Allocates all P and all Q in one tensor each, and computes P.
  void compute_p(InFlightBucket& flight) {
    auto& state = *flight.state;
    int64_t ps_size = 0;
    int64_t qs_size = 0;
    for (auto& batch : flight.batches) {
      batch.stacked = batch.matrices.size() == 1 ? batch.matrices.front().unsqueeze(0)
                                                 : at::stack(batch.matrices);
      const auto r = rank_of(batch.stacked.size(1), batch.stacked.size(2));
      ps_size += batch.stacked.size(0) * batch.stacked.size(1) * r;
      qs_size += batch.stacked.size(0) * batch.stacked.size(2) * r;
    }
    const bool is_warm = options_.warm_start() && state.qs.defined() && state.qs.numel() == qs_size;
    state.qs = is_warm ? state.qs.to(flight.buffer.device())
                       : at::empty({qs_size}, flight.buffer.options());
    flight.ps = at::empty({ps_size}, flight.buffer.options());
    flight.qs = at::empty_like(state.qs);
    std::vector<at::Tensor> qs;
    int64_t p_at = 0;
    int64_t q_at = 0;
    for (auto& batch : flight.batches) {
      const auto count = batch.stacked.size(0);
      const auto n = batch.stacked.size(1);
      const auto m = batch.stacked.size(2);
      const auto r = rank_of(n, m);
      batch.p = flight.ps.narrow(0, p_at, count * n * r).view({count, n, r});
      batch.q = flight.qs.narrow(0, q_at, count * m * r).view({count, m, r});
      batch.kept_q = state.qs.narrow(0, q_at, count * m * r).view({count, m, r});
      p_at += count * n * r;
      q_at += count * m * r;
      qs.push_back(batch.kept_q);
    }
    if (!is_warm) fill_normal(qs, seeds_.next());
    flight.qs.copy_(state.qs);
    for (auto& batch : flight.batches) {
      orthogonalize(batch.q, options_.orthogonalization_epsilon());
      at::bmm_out(batch.p, batch.stacked, batch.q);
    }
  }

  ProcessGroup group() const { return group_.get(); }

  void start_all_reduce(InFlightBucket& flight, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    std::vector<at::Tensor> tensors{tensor};
    flight.works.push_back(group()->allreduce(tensors));
  }

  // Starts the second collective of the previous bucket, with a callback that finishes the bucket.
  void start_second_all_reduce() {
    const auto flight = std::exchange(pending_, nullptr);
    if (!flight) return;
    try {
      for (const auto& work : flight->works) work->wait();
      flight->works.clear();
      if (flight->batches.empty()) {
        finish(*flight, group()->getSize());
        return;
      }
      for (auto& batch : flight->batches) {
        orthogonalize(batch.p, options_.orthogonalization_epsilon());
        at::bmm_out(batch.q, batch.stacked.transpose(1, 2), batch.p);
      }
      std::vector<at::Tensor> tensors{flight->qs};
      const auto sent = group()->allreduce(tensors)->getFuture();
      // Do not capture the group: its own thread must not release the last reference to it.
      sent->addCallback([flight, world = group()->getSize()](c10::ivalue::Future& done) {
        try {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          finish(*flight, world);
        } catch (...) {
          flight->result->setError(std::current_exception());
        }
      });
    } catch (...) {
      flight->result->setError(std::current_exception());
    }
  }

  // Runs once everything is reduced; on the group's thread where there is a second collective.
  static void finish(InFlightBucket& flight, int world) {
    for (auto* reduced : {&flight.whole_together, &flight.qs}) {
      if (reduced->defined()) reduced->div_(world);
    }
    // A gradient that is not finite makes all of its Q not finite.
    flight.is_finite = all_finite({flight.whole_together, flight.qs});
    int64_t at = 0;
    for (const auto& gradient : flight.whole) {
      const auto mean =
          flight.whole_together.narrow(0, at, gradient.numel()).view(gradient.sizes());
      overwrite_part(flight, gradient, [&](const at::Tensor& out) { out.copy_(mean); });
      at += gradient.numel();
    }
    for (auto& batch : flight.batches) decompress(flight, batch);
    // A future runs its callbacks on a stream of its own, and this is the last use of these.
    record_use(flight.whole_together);
    record_use(flight.ps);
    for (const auto& batch : flight.batches) record_use(batch.stacked);
    flight.result->markCompleted(flight.buffer);
  }

  static void decompress(const InFlightBucket& flight, Batch& batch) {
    // A direction of length 0, as of a gradient that is 0, would never change again: keep the last
    // one.
    constexpr auto kInfinity = std::numeric_limits<double>::infinity();
    const auto largest =
        at::linalg_vector_norm(batch.q, kInfinity, at::IntArrayRef{1}, /*keepdim=*/true);
    at::where_out(
        batch.kept_q, largest.gt(0).logical_and_(flight.is_finite), batch.q, batch.kept_q);
    const auto q = batch.q.transpose(1, 2);
    if (batch.matrices.size() == 1) {
      overwrite_part(flight, batch.stacked, [&](at::Tensor out) { at::bmm_out(out, batch.p, q); });
      return;
    }
    at::bmm_out(batch.stacked, batch.p, q);
    for (size_t i = 0; i < batch.matrices.size(); ++i) {
      const auto value = batch.stacked[static_cast<int64_t>(i)];
      overwrite_part(flight, batch.matrices[i], [&](const at::Tensor& out) { out.copy_(value); });
    }
  }

  // Overwrites a part of the bucket with the output of `fill`, and stores the difference as the
  // error.
  template <typename Fill>
  static void overwrite_part(const InFlightBucket& flight, const at::Tensor& part, Fill fill) {
    const auto& errors = flight.state->error;
    const bool is_known = flight.is_finite.is_cpu();
    if (!errors.defined() || (is_known && !flight.is_finite.item<bool>())) {
      fill(part);
      return;
    }
    const auto offset = part.storage_offset() - flight.buffer.storage_offset();
    auto error = errors.as_strided(part.sizes(), part.strides(), errors.storage_offset() + offset);
    if (is_known) {
      error.copy_(part);
      fill(part);
      error.sub_(part);
    } else {
      const auto value = at::empty_like(part);
      fill(value);
      at::where_out(error, flight.is_finite, part - value, error);
      part.copy_(value);
    }
  }

  const PowerSGDOptions options_;
  GroupArg group_;  // left out: the default group of the moment
  CommHook average_;
  SeedSequence seeds_;
  CompressionStats stats_;
  BucketStates<BucketState> states_;
  InFlightBucketPtr pending_;  // emptied before the second collective, so that it starts only once
  int64_t iteration_ = 0;
};

PowerSGD::PowerSGD(const PowerSGDOptions& options, const GroupArg& group) {
  check_options(options);
  impl_ = std::make_shared<Impl>(options, group);
}

PowerSGD::operator CommHook() const {
  return [impl = impl_](GradBucket& bucket) { return impl->reduce(bucket); };
}

std::string summary(const CompressionStats& stats) {
  return ddp::str(
      stats.numel_before, " elements compressed to ", stats.numel_after, ", rate ", stats.rate());
}

CompressionStats PowerSGD::stats() const { return impl_->stats(); }

void PowerSGD::rebind(const GroupArg& group) { impl_->rebind(group.get()); }

void PowerSGD::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }

void PowerSGD::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

CommHook power_sgd(const PowerSGDOptions& options, const GroupArg& group) {
  return PowerSGD(options, group);
}

}  // namespace ddp::hooks
