#include "bucket.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/util/StringUtil.h>

#include "gradient_copy.h"

namespace ddp {
namespace {

// Aliases `flat` without being an autograd view of it: optimizers call `detach_()` on gradients in
// `zero_grad()`, which a view refuses.
at::Tensor alias(
    const at::Tensor& flat, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto view = at::empty({0}, flat.options());
  view.set_(flat.storage(), flat.storage_offset() + offset, sizes, strides);
  return view;
}

// Another tensor on the same memory: what is done to one as an object (detach_, requires_grad_)
// does not reach the other.
at::Tensor twin(const at::Tensor& view) {
  return at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
}

// A gradient as an embedding makes it, rows with an index each, of none. Ranks have to agree which
// dimensions have indices.
at::Tensor no_rows(const at::Tensor& parameter) {
  auto values = parameter.sizes().vec();
  values.front() = 0;
  const auto options =
      at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  return at::sparse_coo_tensor(
      at::empty({1, 0}, options.dtype(at::kLong)), at::empty(values, options), parameter.sizes());
}

std::string describe(const at::Tensor& t) {
  return c10::str(t.scalar_type(), " on ", t.device(), ", layout ", t.layout(), ", ", t.sizes());
}

}  // namespace

Bucket::Bucket(
    const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
    MakeStorage make_storage)
    : indices_(std::move(indices)) {
  int64_t total = 0;
  for (const size_t index : indices_) {
    const auto& parameter = parameters.at(index);
    names_.push_back(parameter.name);
    parameters_.push_back(parameter.tensor);
    offsets_.push_back(total);
    total += parameter.tensor.numel();
    sparse_ = sparse_ || parameter.expect_sparse;
  }
  TORCH_INTERNAL_ASSERT(!indices_.empty() && (!sparse_ || indices_.size() == 1));
  if (sparse_) return;
  const auto options = at::TensorOptions()
                           .dtype(parameters_.front().scalar_type())
                           .device(parameters_.front().device());
  storage_ = make_storage(total + tail, options).zero_();
  gradients_ = storage_.narrow(0, 0, total);
  tail_ = storage_.narrow(0, total, tail);
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    views_.push_back(make_view(storage_, parameters_[slot], offsets_[slot]));
    addresses_.push_back(views_.back().const_data_ptr());
  }
  remembered_.resize(views_.size());
}

Bucket::Bucket(Bucket&& other) noexcept
    : pending(other.pending.load()),
      work(std::move(other.work)),
      future(std::move(other.future)),
      indices_(std::move(other.indices_)),
      names_(std::move(other.names_)),
      parameters_(std::move(other.parameters_)),
      views_(std::move(other.views_)),
      offsets_(std::move(other.offsets_)),
      addresses_(std::move(other.addresses_)),
      remembered_(std::move(other.remembered_)),
      storage_(std::move(other.storage_)),
      gradients_(std::move(other.gradients_)),
      tail_(std::move(other.tail_)),
      sparse_(other.sparse_) {}

at::Tensor Bucket::make_view(
    const at::Tensor& flat, const at::Tensor& parameter, int64_t offset) const {
  if (parameter.is_non_overlapping_and_dense()) {
    return alias(flat, offset, parameter.sizes(), parameter.strides());
  }
  return alias(flat, offset, parameter.sizes(), c10::contiguous_strides(parameter.sizes()));
}

// Looks at the view last: in most cases its address, which is near at hand, tells.
bool Bucket::holds(size_t slot, const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided || grad.const_data_ptr() != addresses_[slot]) return false;
  return grad.strides() == views_[slot].strides() && grad.sizes() == views_[slot].sizes();
}

std::vector<std::string> Bucket::gather(
    double scale, const std::vector<char>* used, Unused unused) {
  std::vector<std::string> problems;
  const auto note = [&](std::string problem) {
    if (!problem.empty()) problems.push_back(std::move(problem));
  };
  const auto is_used = [&](size_t slot) { return !used || (*used)[indices_[slot]]; };
  if (sparse_) {
    if (is_used(0) || unused == Unused::Remember) {
      note(gather_sparse(scale));
    } else {
      gradients_ = no_rows(parameters_.front());
    }
    return problems;
  }
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (!is_used(slot)) set_aside(slot, unused);
    if (is_used(slot) || unused == Unused::Remember) note(gather_one(slot, scale));
  }
  return problems;
}

void Bucket::set_aside(size_t slot, Unused unused) {
  const auto& view = views_[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  if (grad.defined() && holds(slot, grad)) remembered_[slot] = view.clone();
  if (unused == Unused::Zero) view.zero_();
}

std::string Bucket::gather_one(size_t slot, double scale) {
  const auto& view = views_[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  // A rank that has no say (no samples) has none with infinities either.
  if (!grad.defined() || scale == 0) {
    view.zero_();
    return {};
  }
  if (holds(slot, grad)) {
    scale_in_place(view, scale);
    return {};
  }
  if (grad.scalar_type() == view.scalar_type() && grad.device() == view.device() &&
      grad.layout() == view.layout() && grad.sizes() == view.sizes()) {
    copy_scaled(view, grad, scale);
    return {};
  }
  view.zero_();
  return c10::str(
      "expected the gradient of ", names_[slot], " to be ", describe(view), ", as its bucket, got ",
      describe(grad));
}

std::string Bucket::gather_sparse(double scale) {
  const auto& parameter = parameters_.front();
  const at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined() && grad.layout() == at::kSparse) {
    gradients_ = scale == 1.0 ? grad.clone() : grad * scale;
    return {};
  }
  gradients_ = no_rows(parameter);
  return grad.defined()
             ? c10::str(
                   "expected the gradient of ", names_.front(),
                   " to be sparse, as of an embedding with sparse=true, got ", describe(grad))
             : std::string();
}

void Bucket::scatter(const at::Tensor& reduced, bool as_views, const std::vector<char>& keep) {
  if (sparse_) {
    if (keep.empty() || !keep[indices_.front()]) scatter_sparse(reduced);
    return;
  }
  const bool elsewhere = reduced.const_data_ptr() != storage_.const_data_ptr();
  if (elsewhere && as_views) gradients_.copy_(reduced);
  const bool copy_from_reduced = elsewhere && !as_views;
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (!keep.empty() && keep[indices_[slot]]) {
      if (remembered_[slot].defined()) copy_scaled(views_[slot], remembered_[slot], 1.0);
      continue;
    }
    at::Tensor& grad = parameters_[slot].mutable_grad();
    const auto& view = views_[slot];
    if (grad.defined() && holds(slot, grad)) continue;
    // With create_graph a gradient has a graph of its own, which an alias would cut off.
    if (as_views && !(grad.defined() && grad.requires_grad())) {
      grad = twin(view);
      continue;
    }
    if (!grad.defined()) grad = at::empty_strided(view.sizes(), view.strides(), view.options());
    if (copy_from_reduced) {
      copy_scaled(grad, make_view(reduced, parameters_[slot], offsets_[slot]), 1.0);
    } else {
      copy_scaled(grad, view, 1.0);
    }
    // Written behind autograd's back: whoever saved this gradient has to notice.
    grad.unsafeGetTensorImpl()->bump_version();
  }
  remembered_.assign(views_.size(), at::Tensor());
}

void Bucket::scatter_sparse(const at::Tensor& reduced) {
  at::Tensor& grad = parameters_.front().mutable_grad();
  if (grad.defined() && grad.layout() == at::kSparse) {
    grad.copy_(reduced);
  } else {
    grad = reduced;
  }
  gradients_ = at::Tensor();
}

void Bucket::adopt_gradients() {
  if (sparse_) return;
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    at::Tensor& grad = parameters_[slot].mutable_grad();
    if (!grad.defined() || grad.scalar_type() != views_[slot].scalar_type()) continue;
    copy_scaled(views_[slot], grad, 1.0);
    grad = twin(views_[slot]);
  }
}

}  // namespace ddp
