#include <ddp/top_k.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/groups.h>

#include "bucket_states.h"
#include "largest.h"

namespace ddp::hooks {
namespace {

// Elements of a bucket and their indices, in one piece of memory: one collective sends both.
struct Selection {
  Selection(at::Tensor memory, int64_t count, at::ScalarType dtype) : bytes(std::move(memory)) {
    const auto value_bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    values = bytes.narrow(0, 0, value_bytes).view(dtype);
    indices = bytes.narrow(0, aligned(value_bytes), count * kIndexBytes).view(at::kInt);
  }

  static int64_t size(int64_t count, at::ScalarType dtype) {
    const auto value_bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    return aligned(aligned(value_bytes) + count * kIndexBytes);
  }

  /// [world, count]: the values of the selections of all ranks, which follow each other in memory.
  static at::Tensor values_of_all(
      const at::Tensor& memory, int64_t world, int64_t count, at::ScalarType dtype) {
    const auto value_bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    return memory.view({world, -1}).narrow(1, 0, value_bytes).view(dtype);
  }

  at::Tensor bytes;
  at::Tensor values;
  at::Tensor indices;

 private:
  static constexpr int64_t kIndexBytes = 4;
  // The alignment that every dtype needs.
  static int64_t aligned(int64_t size) { return at::round_up(size, int64_t{8}); }
};

void check_options(const TopKOptions& options) {
  DDP_CHECK_VALUE(
      options.ratio() > 0 && options.ratio() <= 1,
      "TopK: expected ratio to be above 0 and at most 1, got ", options.ratio(),
      ". 0.01 is usual.");
  DDP_CHECK_VALUE(
      options.start_iter() >= 0, "TopK: expected start_iter to be at least 0, got ",
      options.start_iter(), ". Name a step.");
}

}  // namespace

class TopK::Impl {
 public:
  Impl(const TopKOptions& options, const GroupArg& group)
      : options_(options), group_(group), average_(all_reduce(group)) {}

  void rebind(const ProcessGroup& group) {
    group_ = group;
    average_ = all_reduce(group);
  }

  c10::intrusive_ptr<c10::ivalue::Future> reduce(GradBucket& bucket) {
    const auto& buffer = bucket.buffer();
    // Indices are sent as int32.
    const bool is_whole = iteration_ < options_.start_iter() || buffer.is_sparse() ||
                          buffer.is_complex() || buffer.numel() == 0 ||
                          buffer.numel() > std::numeric_limits<int32_t>::max();
    auto result = is_whole ? average_(bucket) : exchange(bucket);
    if (bucket.is_last()) {
      ++iteration_;
      states_.end_pass();
    }
    return result;
  }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("iteration", c10::IValue(iteration_));
    c10::impl::GenericDict errors(c10::StringType::get(), c10::TensorType::get());
    states_.for_each([&](const std::string& name, const Residual& residual) {
      if (residual.error.defined()) errors.insert(name, residual.error);
    });
    archive.write("errors", c10::IValue(errors));
  }

  void load(torch::serialize::InputArchive& archive) {
    c10::IValue iteration;
    c10::IValue saved;
    archive.read("iteration", iteration);
    archive.read("errors", saved);
    std::map<std::string, std::shared_ptr<Residual>> residuals;
    for (const auto& entry : saved.toGenericDict()) {
      const Residual residual{entry.value().toTensor().clone()};
      residuals[entry.key().toStringRef()] = std::make_shared<Residual>(residual);
    }
    iteration_ = iteration.toInt();
    states_.assign(std::move(residuals));
  }

 private:
  struct Residual {
    at::Tensor error;  // with use_error_feedback
  };

  ProcessGroup group() const { return group_.get(); }

  c10::intrusive_ptr<c10::ivalue::Future> exchange(GradBucket& bucket) {
    const at::Tensor& buffer = bucket.buffer();
    const auto residual = states_.of(bucket);
    // The error is not updated until the gathered values are known to be finite.
    if (residual->error.defined()) {
      residual->error = residual->error.to(buffer.device());
      buffer.add_(residual->error);
    } else if (options_.use_error_feedback()) {
      residual->error = at::zeros_like(buffer);
    }

    const auto numel = buffer.numel();
    const auto share = std::ceil(options_.ratio() * static_cast<double>(numel));
    const auto count = std::clamp(static_cast<int64_t>(share), int64_t{1}, numel);
    const auto dtype = buffer.scalar_type();
    const auto size = Selection::size(count, dtype);
    const auto bytes = buffer.options().dtype(at::kByte);
    const Selection mine(at::empty({size}, bytes), count, dtype);
    const auto chosen = largest_magnitudes(buffer, count);
    mine.indices.copy_(chosen);
    mine.values.copy_(buffer.index_select(0, chosen));

    const int64_t world = group()->getSize();
    const auto all = at::empty({world * size}, bytes);
    auto to = all;
    auto from = mine.bytes;
    return group()->DDP_GROUP_ALL_GATHER_SINGLE(to, from)->getFuture()->then(
        [=](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          if (residual->error.defined()) {
            buffer.index_fill_(0, chosen, 0);
            // Non-finite elements count as the largest, so they are among the values.
            const auto is_finite = all_finite({Selection::values_of_all(all, world, count, dtype)});
            at::where_out(residual->error, is_finite, buffer, residual->error);
            record_use(chosen);  // on a stream of the future's
          }
          buffer.zero_();
          // Add the ranks in order, so that sums are equal on all ranks.
          for (int64_t rank = 0; rank < world; ++rank) {
            const Selection theirs(all.narrow(0, rank * size, size), count, dtype);
            buffer.index_add_(0, theirs.indices, theirs.values);
          }
          buffer.div_(world);
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }

  const TopKOptions options_;
  GroupArg group_;  // left out: the default group of the moment
  CommHook average_;
  BucketStates<Residual> states_;
  int64_t iteration_ = 0;
};

TopK::TopK(const TopKOptions& options, const GroupArg& group) {
  check_options(options);
  impl_ = std::make_shared<Impl>(options, group);
}

TopK::operator CommHook() const {
  return [impl = impl_](GradBucket& bucket) { return impl->reduce(bucket); };
}

void TopK::rebind(const GroupArg& group) { impl_->rebind(group.get()); }

void TopK::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }

void TopK::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

CommHook top_k(const TopKOptions& options, const GroupArg& group) { return TopK(options, group); }

}  // namespace ddp::hooks
