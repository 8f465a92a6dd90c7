#include <ddp/power_sgd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ddp/internal/check.h>

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
  Impl(const PowerSGDOptions& options, const ProcessGroup& group)
      : options_(options),
        group_(group ? group : default_group()),
        average_(all_reduce(group_)),
        seeds_(static_cast<uint32_t>(options.random_seed())) {}

  // Collectives leave here alone, on the thread of the backward pass, and in one order: the first
  // of bucket i + 1, then the second of bucket i.
  FuturePtr reduce(GradBucket& bucket) {
    const bool is_last = bucket.is_last();
    const auto& buffer = bucket.buffer();
    FuturePtr result;
    if (iteration_ < options_.start_iter() || buffer.is_sparse() || buffer.is_complex()) {
      result = average_(bucket);
    } else {
      auto flight = begin(bucket);
      result = flight->result;
      send_second();
      pending_ = std::move(flight);
    }
    if (is_last) {
      send_second();
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
      for (const auto& [part, tensor] : parts_of(state)) {
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
      for (const auto& [part, tensor] : parts_of(*state)) {
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
  // What stays of a bucket from one step to the next.
  struct BucketState {
    at::Tensor error;  // of use_error_feedback
    at::Tensor ps;
    at::Tensor qs;
  };

  // Gradients of one shape that are approximated together.
  struct Batch {
    std::vector<at::Tensor> matrices;  // into the bucket, for the approximation
    std::vector<at::Tensor> inputs;    // into Flight::input
    at::Tensor stacked = {};           // [batch, n, m]: the one input itself, or a copy of many
    at::Tensor p = {};                 // [batch, n, r], into BucketState::ps
    at::Tensor q = {};                 // [batch, m, r], into BucketState::qs
  };

  // A bucket on its way.
  struct Flight {
    std::shared_ptr<BucketState> state;
    at::Tensor buffer;
    at::Tensor input;  // gradients and what was lost before; without use_error_feedback the buffer
    std::vector<at::Tensor> whole;
    at::Tensor whole_together;
    std::vector<Batch> batches;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    FuturePtr result;
  };

  using FlightPtr = std::shared_ptr<Flight>;

  static constexpr size_t kPartLength = 2;

  static std::vector<std::pair<std::string, at::Tensor*>> parts_of(BucketState& state) {
    return {{".e", &state.error}, {".p", &state.ps}, {".q", &state.qs}};
  }

  int64_t rank_of(int64_t n, int64_t m) const {
    return std::min({n, m, options_.matrix_approximation_rank()});
  }

  bool is_worth_it(const at::Tensor& matrix) const {
    if (!matrix.defined()) return false;
    const auto n = matrix.size(0);
    const auto m = matrix.size(1);
    const auto compressed = static_cast<double>((n + m) * rank_of(n, m));
    return compressed * options_.min_compression_rate() < static_cast<double>(n * m);
  }

  FlightPtr begin(GradBucket& bucket) {
    auto flight = std::make_shared<Flight>();
    flight->buffer = bucket.buffer();
    const auto device = flight->buffer.device();
    flight->result = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(),
        device.is_cuda() ? std::vector<c10::Device>{device} : std::vector<c10::Device>{});
    const auto state = states_.of(bucket);
    flight->state = state;
    flight->input = input_of(flight->buffer, *state);
    divide(*flight, bucket.gradients());
    make_ps(*flight);
    send(*flight, flight->whole_together);
    if (!flight->batches.empty()) send(*flight, state->ps);
    return flight;
  }

  // In the memory of the error, which follows from it: what is as large as all gradients is touched
  // as seldom as can be.
  at::Tensor input_of(const at::Tensor& buffer, BucketState& state) const {
    if (!options_.use_error_feedback()) return buffer;
    const auto error = std::exchange(state.error, {});
    return error.defined() ? error.to(buffer.device()).add_(buffer) : buffer.clone();
  }

  // What is compressed, those of one shape behind each other, and what travels whole.
  void divide(Flight& flight, const std::vector<at::Tensor>& gradients) {
    const auto in_input = [&](const at::Tensor& part) {
      const auto offset = part.storage_offset() - flight.buffer.storage_offset();
      return flight.input.as_strided(
          part.sizes(), part.strides(), flight.input.storage_offset() + offset);
    };
    std::vector<at::Tensor> flat;
    std::vector<std::vector<at::Tensor>> shapes;
    for (const auto& gradient : gradients) {
      const auto matrix = as_matrix(gradient);
      stats_.numel_before += gradient.numel();
      if (!is_worth_it(matrix)) {
        stats_.numel_after += gradient.numel();
        flight.whole.push_back(gradient);
        flat.push_back(in_input(gradient).reshape({-1}));
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
        batch.inputs.push_back(in_input(matrix));
        batch.matrices.push_back(std::move(matrix));
      }
    }
  }

  // Cuts P and Q out of the bucket's memory, and computes P.
  void make_ps(Flight& flight) {
    auto& state = *flight.state;
    int64_t ps_size = 0;
    int64_t qs_size = 0;
    for (auto& batch : flight.batches) {
      batch.stacked =
          batch.inputs.size() == 1 ? batch.inputs.front().unsqueeze(0) : at::stack(batch.inputs);
      const auto r = rank_of(batch.stacked.size(1), batch.stacked.size(2));
      ps_size += batch.stacked.size(0) * batch.stacked.size(1) * r;
      qs_size += batch.stacked.size(0) * batch.stacked.size(2) * r;
    }
    const bool is_warm = options_.warm_start() && state.qs.defined() &&
                         state.qs.numel() == qs_size && state.ps.numel() == ps_size;
    if (is_warm) {
      state.ps = state.ps.to(flight.buffer.device());
      state.qs = state.qs.to(flight.buffer.device());
    } else {
      state.ps = at::empty({ps_size}, flight.buffer.options());
      state.qs = at::empty({qs_size}, flight.buffer.options());
    }
    std::vector<at::Tensor> qs;
    int64_t p_at = 0;
    int64_t q_at = 0;
    for (auto& batch : flight.batches) {
      const auto count = batch.stacked.size(0);
      const auto n = batch.stacked.size(1);
      const auto m = batch.stacked.size(2);
      const auto r = rank_of(n, m);
      batch.p = state.ps.narrow(0, p_at, count * n * r).view({count, n, r});
      batch.q = state.qs.narrow(0, q_at, count * m * r).view({count, m, r});
      p_at += count * n * r;
      q_at += count * m * r;
      qs.push_back(batch.q);
    }
    if (!is_warm) fill_normal(qs, seeds_.next());
    for (auto& batch : flight.batches) {
      orthogonalize(batch.q, options_.orthogonalization_epsilon());
      at::bmm_out(batch.p, batch.stacked, batch.q);
    }
  }

  void send(Flight& flight, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    std::vector<at::Tensor> tensors{tensor};
    flight.works.push_back(group_->allreduce(tensors));
  }

  // The second collective of the bucket before, and what follows it.
  void send_second() {
    const auto flight = std::exchange(pending_, nullptr);
    if (!flight) return;
    try {
      for (const auto& work : flight->works) work->wait();
      flight->works.clear();
      unpack_whole(*flight);
      if (flight->batches.empty()) {
        finish(*flight);
        flight->result->markCompleted(flight->buffer);
        return;
      }
      for (auto& batch : flight->batches) {
        orthogonalize(batch.p, options_.orthogonalization_epsilon());
        at::bmm_out(batch.q, batch.stacked.transpose(1, 2), batch.p);
      }
      std::vector<at::Tensor> tensors{flight->state->qs};
      const auto sent = group_->allreduce(tensors)->getFuture();
      // Without the group: its own thread is not to be the one that ends it.
      sent->addCallback([flight, world = group_->getSize()](c10::ivalue::Future& done) {
        decompress(*flight, world, done);
      });
    } catch (...) {
      flight->result->setError(std::current_exception());
    }
  }

  void unpack_whole(Flight& flight) {
    if (!flight.whole_together.defined()) return;
    flight.whole_together.div_(group_->getSize());
    int64_t at = 0;
    for (const auto& gradient : flight.whole) {
      gradient.copy_(flight.whole_together.narrow(0, at, gradient.numel()).view(gradient.sizes()));
      at += gradient.numel();
    }
  }

  // On the group's thread.
  static void decompress(Flight& flight, int world, c10::ivalue::Future& done) noexcept {
    try {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      flight.state->qs.div_(world);
      for (auto& batch : flight.batches) {
        if (batch.matrices.size() == 1) {
          auto matrix = batch.matrices.front().unsqueeze(0);
          at::bmm_out(matrix, batch.p, batch.q.transpose(1, 2));
          continue;
        }
        at::bmm_out(batch.stacked, batch.p, batch.q.transpose(1, 2));
        for (size_t i = 0; i < batch.matrices.size(); ++i) {
          batch.matrices[i].copy_(batch.stacked[static_cast<int64_t>(i)]);
        }
      }
      finish(flight);
      flight.result->markCompleted(flight.buffer);
    } catch (...) {
      flight.result->setError(std::current_exception());
    }
  }

  static void finish(Flight& flight) {
    if (flight.input.is_same(flight.buffer)) return;
    flight.state->error = flight.input.sub_(flight.buffer);
  }

  const PowerSGDOptions options_;
  const ProcessGroup group_;
  const CommHook average_;
  SeedSequence seeds_;
  CompressionStats stats_;
  BucketStates<BucketState> states_;
  FlightPtr pending_;  // sent once, not twice
  int64_t iteration_ = 0;
};

PowerSGD::PowerSGD(const PowerSGDOptions& options, const ProcessGroup& group) {
  check_options(options);
  impl_ = std::make_shared<Impl>(options, group);
}

PowerSGD::operator CommHook() const {
  return [impl = impl_](GradBucket& bucket) { return impl->reduce(bucket); };
}

CompressionStats PowerSGD::stats() const { return impl_->stats(); }

void PowerSGD::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }

void PowerSGD::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

CommHook power_sgd(const PowerSGDOptions& options, const ProcessGroup& group) {
  return PowerSGD(options, group);
}

}  // namespace ddp::hooks
