#include "buckets/bucket.h"

#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/util/Exception.h>
#include <ddp/internal/current_stream.h>

#include "gradients/finite_check.h"
#include "gradients/gradient_copy.h"

namespace ddp {
namespace {

// No rows, but as all ranks must have them: one sparse dimension, as the gradient of an embedding.
at::Tensor sparse_without_rows(const at::Tensor& parameter) {
  auto values = parameter.sizes().vec();
  values.front() = 0;
  const auto options =
      at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  return at::sparse_coo_tensor(
      at::empty({1, 0}, options.dtype(at::kLong)), at::empty(values, options), parameter.sizes());
}

/// A sparse gradient that is ready to be sent.
struct PackedSparse {
  at::Tensor gradient;     // a copy that a collective may write to
  std::string difference;  // kind_difference() of a gradient that is not sparse; else ""
};

// The gradient of `parameter` times `scale`; no rows where it has none or a dense one.
PackedSparse pack_sparse(const at::Tensor& parameter, double scale) {
  const at::Tensor& grad = parameter.mutable_grad();
  const bool is_sparse = grad.defined() && grad.layout() == at::kSparse;
  // A rank with weight 0 (no samples) sends no rows, so that inf * 0 cannot become NaN.
  if (is_sparse && scale != 0) return {scale == 1.0 ? grad.clone() : grad * scale, ""};
  if (is_sparse || !grad.defined()) return {sparse_without_rows(parameter), ""};
  auto none = sparse_without_rows(parameter);
  auto difference = kind_difference(grad, none);
  return {std::move(none), std::move(difference)};
}

void unpack_sparse(const at::Tensor& parameter, const at::Tensor& reduced) {
  at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined() && grad.layout() == at::kSparse) {
    grad.copy_(reduced);
  } else {
    grad = reduced;
  }
}

}  // namespace

Bucket::Bucket(
    const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
    std::unique_ptr<GradientPlacement> placement, BucketStorage::Allocate allocate,
    const std::shared_ptr<GradientMemory>& memory, int64_t slot_bytes)
    : indices_(std::move(indices)),
      placement_(std::move(placement)),
      allocate_(std::move(allocate)),
      tail_(tail),
      slot_bytes_(slot_bytes) {
  for (const size_t index : indices_) {
    const auto& parameter = parameters.at(index);
    names_.push_back(parameter.name);
    parameters_.push_back(parameter.tensor);
    sparse_ = sparse_ || parameter.expect_sparse;
  }
  TORCH_INTERNAL_ASSERT(!indices_.empty() && (!sparse_ || indices_.size() == 1));
  if (sparse_) return;
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    const auto& parameter = parameters_[slot];
    if (memory && DirectGradient::is_eligible(parameter, *memory)) {
      direct_.emplace(slot, DirectGradient(parameter, memory));
    } else {
      packed_slots_.push_back(slot);
      packed_parameters_.push_back(parameter);
    }
  }
  saved_.resize(packed_slots_.size());
}

void Bucket::allocate() {
  if (sparse_ || storage_.all().defined()) return;
  const auto& first = parameters_.front();
  storage_ = BucketStorage(
      packed_parameters_, tail_,
      at::TensorOptions().dtype(first.scalar_type()).device(first.device()), allocate_,
      slot_bytes_);
}

void Bucket::release() { storage_ = {}; }

void Bucket::record_use() const { ddp::record_use(storage_.all()); }

int64_t Bucket::storage_bytes() const {
  if (sparse_) return 0;
  const auto size = static_cast<int64_t>(parameters_.front().element_size());
  return (BucketStorage::numel_of(packed_parameters_, slot_bytes_) + tail_) * size;
}

std::vector<at::Tensor> Bucket::wires() const {
  if (sparse_) return {packed_};
  std::vector<at::Tensor> wires;
  if (storage_.all().numel() > 0 || direct_.empty()) wires.push_back(storage_.wire());
  for (const auto& [slot, direct] : direct_) wires.push_back(direct.wire());
  return wires;
}

int64_t Bucket::bytes() const {
  size_t bytes = 0;
  if (sparse_) return 0;
  for (const auto& parameter : parameters_) bytes += parameter.nbytes();
  return static_cast<int64_t>(bytes);
}

std::vector<size_t> Bucket::direct_sizes() const {
  std::vector<size_t> sizes;
  for (const auto& [slot, direct] : direct_) sizes.push_back(parameters_[slot].nbytes());
  return sizes;
}

std::vector<Bucket::KindMismatch> Bucket::pack(
    double scale, const std::vector<char>* used, Unused unused, std::vector<size_t>* not_finite) {
  const auto is_used = [&](size_t slot) { return !used || (*used)[indices_[slot]]; };
  FiniteCheck finite;
  auto* check = not_finite != nullptr && device().is_cpu() ? &finite : nullptr;
  const auto find = [&](size_t slot) {
    const bool failed = check != nullptr && check->take_failed();
    if (failed && is_used(slot)) not_finite->push_back(indices_[slot]);
  };
  pack_skipped_ = false;
  if (sparse_) {
    auto mismatches = pack_sparse_one(scale, !is_used(0) && unused == Unused::Zero);
    if (check != nullptr) check->look(packed_);
    find(0);
    return mismatches;
  }
  allocate();
  std::vector<KindMismatch> mismatches;
  const auto note = [&](size_t slot, std::string difference) {
    if (!difference.empty()) mismatches.push_back({slot, std::move(difference)});
  };
  for (auto& [slot, direct] : direct_) {
    using Send = DirectGradient::Send;
    const auto if_unused = unused == Unused::Zero ? Send::Zeros : Send::Copy;
    note(slot, direct.pack(scale, is_used(slot) ? Send::Gradient : if_unused, check));
    find(slot);
  }
  auto copies = make_copies(scale, check);
  for (size_t packed = 0; packed < packed_slots_.size(); ++packed) {
    prefetch_after(packed);
    const auto slot = packed_slots_[packed];
    if (!is_used(slot)) save_in_place(packed, unused);
    if (!is_used(slot) && unused == Unused::Zero) continue;
    // A rank with weight 0 (no samples) sends zeros, so that inf * 0 cannot become NaN.
    if (scale == 0) {
      storage_.views()[packed].zero_();
      continue;
    }
    auto difference = pack_one(packed, copies);
    find(slot);
    at::Tensor& grad = packed_parameters_[packed].mutable_grad();
    if (difference.empty() && is_used(slot) && grad.defined()) {
      placement_->after_pack(grad, storage_, packed);
    }
    note(slot, std::move(difference));
  }
  copies.finish();
  return mismatches;
}

bool Bucket::skip_pack(const std::vector<char>* used) {
  pack_skipped_ = false;
  if (sparse_ || !direct_.empty() || !placement_->has_own_memory()) return false;
  if (!storage_.all().defined()) return false;
  for (size_t packed = 0; packed < packed_slots_.size(); ++packed) {
    if (used && !(*used)[indices_[packed_slots_[packed]]]) continue;
    const at::Tensor& grad = packed_parameters_[packed].mutable_grad();
    if (!grad.defined() || !is_like(grad, storage_.views()[packed])) return false;
  }
  pack_skipped_ = true;
  return true;
}

std::vector<at::Tensor> Bucket::packed_gradients() const {
  std::vector<at::Tensor> gradients(parameters_.size());
  if (sparse_) gradients.front() = packed_;
  for (size_t packed = 0; packed < packed_slots_.size(); ++packed) {
    gradients[packed_slots_[packed]] =
        pack_skipped_ ? packed_parameters_[packed].mutable_grad() : storage_.views()[packed];
  }
  for (const auto& [slot, direct] : direct_) gradients[slot] = direct.wire();
  return gradients;
}

ScaledCopies Bucket::make_copies(double scale, FiniteCheck* check) const {
  using When = ScaledCopies::When;
  return {scale, parameters_.front().is_cpu() ? When::AtOnce : When::Together, check};
}

// Small gradients are scattered over memory: without a prefetch the cache misses take longer than
// the copies.
void Bucket::prefetch_after(size_t packed) const {
  const auto grad_of = [&](size_t ahead) -> const at::Tensor* {
    if (packed + ahead >= packed_parameters_.size()) return nullptr;
    const at::Tensor& grad = packed_parameters_[packed + ahead].mutable_grad();
    return grad.defined() ? &grad : nullptr;
  };
  constexpr int kLines = 3;  // cache lines of a TensorImpl
  if (const auto* grad = grad_of(12)) {
    const auto* begin = reinterpret_cast<const char*>(grad->unsafeGetTensorImpl());
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(begin + line * 64);
  }
  if (const auto* grad = grad_of(8)) {
    if (grad->has_storage()) __builtin_prefetch(grad->storage().unsafeGetStorageImpl());
  }
  if (const auto* grad = grad_of(4)) {
    if (grad->has_storage()) __builtin_prefetch(grad->storage().data());
  }
}

std::vector<Bucket::KindMismatch> Bucket::pack_sparse_one(double scale, bool zero) {
  auto packed = zero ? PackedSparse{sparse_without_rows(parameters_.front()), ""}
                     : pack_sparse(parameters_.front(), scale);
  packed_ = std::move(packed.gradient);
  if (packed.difference.empty()) return {};
  return {{0, std::move(packed.difference)}};
}

void Bucket::save_in_place(size_t packed, Unused unused) {
  const auto& view = storage_.views()[packed];
  const at::Tensor& grad = packed_parameters_[packed].mutable_grad();
  if (grad.defined() && storage_.has_in_place(packed, grad)) saved_[packed] = view.clone();
  if (unused == Unused::Zero) view.zero_();
}

std::string Bucket::pack_one(size_t packed, ScaledCopies& copies) {
  const auto& view = storage_.views()[packed];
  const at::Tensor& grad = packed_parameters_[packed].mutable_grad();
  if (!grad.defined()) {
    view.zero_();
    return {};
  }
  if (storage_.has_in_place(packed, grad)) {
    copies.scale(view);
    return {};
  }
  if (is_like(grad, view)) {
    copies.copy(view, grad);
    return {};
  }
  view.zero_();
  return kind_difference(grad, view);
}

void Bucket::unpack(const at::Tensor& reduced, const std::vector<char>& keep) {
  if (pack_skipped_) return;
  const auto is_kept = [&](size_t slot) { return !keep.empty() && keep[indices_[slot]]; };
  if (sparse_) {
    if (!is_kept(0)) unpack_sparse(parameters_.front(), reduced);
    packed_.reset();
    return;
  }
  for (auto& [slot, direct] : direct_) direct.unpack(is_kept(slot));
  placement_->receive(storage_, reduced);
  auto copies = make_copies(1.0);
  for (size_t packed = 0; packed < packed_slots_.size(); ++packed) {
    prefetch_after(packed);
    const auto& parameter = packed_parameters_[packed];
    if (!is_kept(packed_slots_[packed])) {
      placement_->put(parameter.mutable_grad(), storage_, packed, reduced, copies);
    } else if (saved_[packed].defined()) {
      copies.copy(storage_.views()[packed], saved_[packed]);
    }
  }
  copies.finish();
  saved_.assign(packed_slots_.size(), at::Tensor());
}

void Bucket::move_in() {
  if (!sparse_) placement_->move_in(storage_, packed_parameters_);
}

}  // namespace ddp
