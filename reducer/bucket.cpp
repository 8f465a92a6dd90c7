// A bucket's parts, and how gradients get into it.
#include "bucket.h"

#include <utility>

#include <c10/util/Exception.h>

#include "gradient_copy.h"
#include "gradient_kind.h"
#include "sparse_gradient.h"

namespace ddp {

Bucket::Bucket(
    const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
    std::unique_ptr<GradientPlacement> placement, BucketStorage::Allocate allocate)
    : indices_(std::move(indices)), placement_(std::move(placement)) {
  for (const size_t index : indices_) {
    const auto& parameter = parameters.at(index);
    names_.push_back(parameter.name);
    parameters_.push_back(parameter.tensor);
    sparse_ = sparse_ || parameter.expect_sparse;
  }
  TORCH_INTERNAL_ASSERT(!indices_.empty() && (!sparse_ || indices_.size() == 1));
  if (sparse_) return;
  storage_ = BucketStorage(parameters_, tail, std::move(allocate));
  remembered_.resize(parameters_.size());
}

std::vector<Bucket::Misfit> Bucket::pack(
    double scale, const std::vector<char>* used, Unused unused) {
  const auto is_used = [&](size_t slot) { return !used || (*used)[indices_[slot]]; };
  if (sparse_) return pack_sparse_one(scale, !is_used(0) && unused == Unused::Zero);
  std::vector<Misfit> misfits;
  using When = ScaledCopies::When;
  ScaledCopies copies(scale, parameters_.front().is_cpu() ? When::AtOnce : When::Together);
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (!is_used(slot)) set_aside(slot, unused);
    if (!is_used(slot) && unused == Unused::Zero) continue;
    // A rank that has no say (no samples) has none with infinities either.
    if (scale == 0) {
      storage_.views()[slot].zero_();
      continue;
    }
    auto difference = pack_one(slot, copies);
    if (!difference.empty()) misfits.push_back({slot, std::move(difference)});
  }
  copies.finish();
  return misfits;
}

std::vector<Bucket::Misfit> Bucket::pack_sparse_one(double scale, bool zero) {
  auto packed = zero ? PackedSparse{no_rows(parameters_.front()), ""}
                     : pack_sparse(parameters_.front(), scale);
  packed_ = std::move(packed.gradient);
  if (packed.difference.empty()) return {};
  return {{0, std::move(packed.difference)}};
}

void Bucket::set_aside(size_t slot, Unused unused) {
  const auto& view = storage_.views()[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  if (grad.defined() && storage_.has_in_place(slot, grad)) remembered_[slot] = view.clone();
  if (unused == Unused::Zero) view.zero_();
}

std::string Bucket::pack_one(size_t slot, ScaledCopies& copies) {
  const auto& view = storage_.views()[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  if (!grad.defined()) {
    view.zero_();
    return {};
  }
  if (storage_.has_in_place(slot, grad)) {
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

}  // namespace ddp
