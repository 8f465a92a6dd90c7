#include <ddp/int8_compress.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/quantized_rows.h>

#include "bucket_states.h"

namespace ddp::hooks {
namespace {

using QuantizedFuture = c10::intrusive_ptr<c10::ivalue::Future>;

at::ScalarType checked_fp8(at::ScalarType dtype) {
  DDP_CHECK_VALUE(
      dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2,
      "Fp8Compress: expected dtype to be Float8_e4m3fn or Float8_e5m2, got ", dtype,
      ". The first is usual; fp16_compress sends half.");
  return dtype;
}

void check_dtype(const char* subject, const GradBucket& bucket) {
  const auto dtype = bucket.buffer().scalar_type();
  DDP_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      subject, ": expected gradients of float, double, half or bfloat16, got ", dtype,
      " in bucket ", bucket.index(), ". Register another hook for this model.");
}

}  // namespace

class ByteCompress::Impl {
 public:
  struct Options {
    const char* subject;  // of errors
    at::ScalarType dtype;
    int64_t block;
    bool error_feedback;
    Quantization per;
  };

  Impl(const Options& options, const GroupArg& group)
      : options_(options), group_(group), average_(all_reduce(group)) {
    DDP_CHECK_VALUE(
        options.block >= 1, options.subject, ": expected block to be at least 1, got ",
        options.block, ". 256 is usual.");
  }

  void rebind(const ProcessGroup& group) {
    group_ = group;
    average_ = all_reduce(group);
  }

  // Only this function starts collectives, on the thread of the backward pass, and in one order:
  // the first of bucket i + 1, then the second of bucket i.
  QuantizedFuture reduce(GradBucket& bucket) {
    const bool is_last = bucket.is_last();
    const at::Tensor& buffer = bucket.buffer();
    if (bucket.index() == 0) pending_ = nullptr;  // of a pass that failed
    QuantizedFuture result;
    if (buffer.is_sparse() || buffer.numel() == 0) {
      result = average_(bucket);
    } else {
      check_dtype(options_.subject, bucket);
      auto flight = begin(bucket);
      result = flight->result;
      gather_pending();
      pending_ = std::move(flight);
    }
    if (is_last) {
      gather_pending();
      states_.end_pass();
    }
    return result;
  }

  void save(torch::serialize::OutputArchive& archive) const {
    c10::impl::GenericDict errors(c10::StringType::get(), c10::TensorType::get());
    states_.for_each([&](const std::string& name, const Lost& lost) {
      if (lost.error.defined()) errors.insert(name, lost.error);
    });
    archive.write("errors", c10::IValue(errors));
  }

  void load(torch::serialize::InputArchive& archive) {
    c10::IValue saved;
    archive.read("errors", saved);
    std::map<std::string, std::shared_ptr<Lost>> states;
    for (const auto& entry : saved.toGenericDict()) {
      const Lost lost{entry.value().toTensor().clone()};
      states[entry.key().toStringRef()] = std::make_shared<Lost>(lost);
    }
    states_.assign(std::move(states));
  }

 private:
  // The errors of quantization, [elements of the bucket] float; with error_feedback.
  struct Lost {
    at::Tensor error;
  };

  // A bucket that is being reduced.
  struct Quantized {
    at::Tensor buffer;
    at::Tensor values;  // float: the buffer or a copy, then what its quantization lost
    std::shared_ptr<Lost> lost;
    RowLayout layout;
    at::Tensor sent;      // [ranks, bytes]: of each rank's share
    at::Tensor received;  // [ranks, bytes]: of this rank's share
    at::Tensor means;     // [ranks, bytes]
    c10::intrusive_ptr<c10d::Work> exchange;
    QuantizedFuture result;
  };

  using QuantizedPtr = std::shared_ptr<Quantized>;

  EncodeOptions encoding(const at::Tensor& feedback) const {
    EncodeOptions encoding;
    encoding.feedback = feedback;
    encoding.keeps_error = options_.error_feedback;
    return encoding;
  }

  // Starts the first collective.
  QuantizedPtr begin(GradBucket& bucket) {
    const auto group = group_.get();
    const at::Tensor& buffer = bucket.buffer();
    const int64_t world = group->getSize();
    const bool is_whole = options_.per == Quantization::Tensor;
    const RowLayout layout(
        buffer.numel(), world, is_whole ? 0 : options_.block,
        /*has_zero_points=*/options_.per != Quantization::Block, options_.dtype);
    const auto flight = std::make_shared<Quantized>(
        Quantized{buffer, buffer.to(at::kFloat), states_.of(bucket), layout, {}, {}, {}, {}, {}});
    const auto device = buffer.device();
    flight->result = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(),
        device.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device});

    auto& error = flight->lost->error;
    if (error.defined()) error = error.to(device);
    auto first = encoding(error);
    first.is_one_range = is_whole;
    flight->sent = encode_rows(flight->values, world, layout, first);
    if (options_.error_feedback && !error.defined()) error = at::zeros_like(flight->values);
    flight->received = at::empty_like(flight->sent);
    std::vector<int64_t> no_splits;
    flight->exchange =
        group->DDP_GROUP_ALL_TO_ALL_SINGLE(flight->received, flight->sent, no_splits, no_splits);
    return flight;
  }

  // Starts the second collective of the previous bucket, with a callback that finishes the bucket.
  void gather_pending() {
    const auto flight = std::exchange(pending_, nullptr);
    if (!flight) return;
    try {
      flight->exchange->wait();
      flight->exchange.reset();
      const auto group = group_.get();
      auto own = encode_mean(*flight, group->getRank());
      flight->means = at::empty_like(flight->sent);
      record_use(flight->sent);
      record_use(flight->received);
      flight->sent = own;
      const auto gathered = group->DDP_GROUP_ALL_GATHER_SINGLE(flight->means, own)->getFuture();
      gathered->addCallback([flight](c10::ivalue::Future& done) {
        try {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          finish(*flight);
          flight->result->markCompleted(flight->buffer);
        } catch (...) {
          flight->result->setError(std::current_exception());
        }
      });
    } catch (...) {
      flight->result->setError(std::current_exception());
    }
  }

  // The mean of this rank's share. Its error becomes this rank's, as if of its own gradients.
  at::Tensor encode_mean(const Quantized& flight, int64_t rank) const {
    const auto& layout = flight.layout;
    const auto mean = mean_of_rows(flight.received, layout);
    const auto own = encode_rows(mean, 1, layout, encoding({}));
    const int64_t from = std::min(rank * layout.share, flight.values.numel());
    const int64_t count = std::min(layout.share, flight.values.numel() - from);
    if (options_.error_feedback && count > 0) {
      const auto world = static_cast<double>(flight.received.size(0));
      flight.values.narrow(0, from, count).add_(mean.narrow(0, 0, count), world);
    }
    return own;
  }

  // Runs on the group's thread; on devices, on a stream of the future's.
  static void finish(const Quantized& flight) {
    const at::Tensor& values = flight.values;
    const RowLayout& layout = flight.layout;
    at::Tensor error = flight.lost->error;
    if (error.defined()) {
      // The same on all ranks, as the means are.
      const auto is_finite = are_rows_finite(flight.means, layout, flight.buffer.scalar_type());
      if (!is_finite.is_cpu()) {
        at::where_out(error, is_finite, values, error);
        error = at::Tensor();
      } else if (!is_finite.item<bool>()) {
        error = at::Tensor();
      }
    }
    decode_rows(flight.means, layout, values, /*previous=*/error);
    if (!values.is_same(flight.buffer)) flight.buffer.copy_(values);
    record_use(values);
    record_use(flight.sent);
    record_use(flight.means);
  }

  const Options options_;
  GroupArg group_;  // left out: the default group of the moment
  CommHook average_;
  BucketStates<Lost> states_;
  QuantizedPtr pending_;  // emptied before its second collective, so that it starts only once
};

ByteCompress::ByteCompress(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

ByteCompress::operator CommHook() const {
  return [impl = impl_](GradBucket& bucket) { return impl->reduce(bucket); };
}

void ByteCompress::rebind(const GroupArg& group) { impl_->rebind(group.get()); }

void ByteCompress::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }

void ByteCompress::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

Int8Compress::Int8Compress(const Int8Options& options, const GroupArg& group)
    : ByteCompress(std::make_shared<Impl>(
          Impl::Options{
              "Int8Compress", at::kByte, options.block(), options.error_feedback(), options.per()},
          group)) {}

Fp8Compress::Fp8Compress(const Fp8Options& options, const GroupArg& group)
    : ByteCompress(std::make_shared<Impl>(
          Impl::Options{
              "Fp8Compress", checked_fp8(options.dtype()), options.block(),
              options.error_feedback(), Quantization::Block},
          group)) {}

CommHook int8_compress(const Int8Options& options, const GroupArg& group) {
  return Int8Compress(options, group);
}

CommHook fp8_compress(const Fp8Options& options, const GroupArg& group) {
  return Fp8Compress(options, group);
}

}  // namespace ddp::hooks
