#include "bucket.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include "gradient_copy.h"

namespace ddp {
namespace {

// Bytes of a gradient that are copied in the time that it takes to move the tensor, about.
constexpr size_t kWorthMoving = size_t{16} << 10;

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

// Puts `t` where `place` lies: it stays the same tensor, for whoever has it.
void relocate(const at::Tensor& t, const at::Tensor& place) {
  // On a device what reads the old memory may still be to come, on a stream that is not its own.
  if (!t.is_cpu()) {
    const c10::impl::VirtualGuardImpl device(t.device().type());
    device.recordDataPtrOnStream(t.storage().data_ptr(), device.getStream(t.device()));
  }
  auto* tensor = t.unsafeGetTensorImpl();
  tensor->set_allow_tensor_metadata_change(true);
  tensor->set_storage_keep_dtype(place.storage());
  tensor->set_storage_offset(place.storage_offset());
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes();
}

// Behind autograd's back: whoever saved this gradient has to notice.
void overwrite(const at::Tensor& grad, const at::Tensor& reduced) {
  copy_scaled(grad, reduced, 1.0);
  grad.unsafeGetTensorImpl()->bump_version();
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
    Placement placement, MakeStorage make_storage)
    : placement_(placement),
      make_storage_(std::move(make_storage)),
      indices_(std::move(indices)),
      tail_numel_(tail) {
  for (const size_t index : indices_) {
    const auto& parameter = parameters.at(index);
    names_.push_back(parameter.name);
    parameters_.push_back(parameter.tensor);
    offsets_.push_back(numel_);
    numel_ += parameter.tensor.numel();
    sparse_ = sparse_ || parameter.expect_sparse;
  }
  TORCH_INTERNAL_ASSERT(!indices_.empty() && (!sparse_ || indices_.size() == 1));
  if (sparse_) return;
  const auto options = at::TensorOptions()
                           .dtype(parameters_.front().scalar_type())
                           .device(parameters_.front().device());
  lay_out(make_storage_(numel_ + tail_numel_, options));
  remembered_.resize(views_.size());
}

void Bucket::lay_out(const at::Tensor& storage) {
  storage_ = storage;
  gradients_ = storage_.narrow(0, 0, numel_);
  tail_ = storage_.narrow(0, numel_, tail_numel_);
  // Backends sum real numbers; a sum of complex numbers is the sum of their parts.
  wire_ = storage_.is_complex() ? at::view_as_real(storage_) : storage_;
  views_.clear();
  addresses_.clear();
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    views_.push_back(make_view(storage_, slot));
    addresses_.push_back(views_.back().const_data_ptr());
  }
  own_tensors_ = static_cast<size_t>(storage_.storage().use_count());
}

at::Tensor Bucket::make_view(const at::Tensor& flat, size_t slot) const {
  const auto& parameter = parameters_[slot];
  if (parameter.is_non_overlapping_and_dense()) {
    return alias(flat, offsets_[slot], parameter.sizes(), parameter.strides());
  }
  return alias(flat, offsets_[slot], parameter.sizes(), c10::contiguous_strides(parameter.sizes()));
}

// Looks at the view last: in most cases its address, which is near at hand, tells.
bool Bucket::holds(size_t slot, const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided || grad.const_data_ptr() != addresses_[slot]) return false;
  return grad.strides() == views_[slot].strides() && grad.sizes() == views_[slot].sizes();
}

bool Bucket::lies_here(const at::Tensor& t) const {
  return t.layout() == at::kStrided &&
         t.storage().unsafeGetStorageImpl() == storage_.storage().unsafeGetStorageImpl();
}

// Counts tensors, not references to them: a gradient that a parameter and somebody else have is
// one, and both see what becomes of it.
bool Bucket::holds_owned_gradients() const {
  return !sparse_ && placement_ == Placement::Owned &&
         static_cast<size_t>(storage_.storage().use_count()) > own_tensors_;
}

// Those of which somebody has a view, or may have, stay with it; so do all where one lies in
// another's place, put there by hand.
bool Bucket::move_out() {
  if (!holds_owned_gradients()) return true;
  std::vector<size_t> visitors;
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    const at::Tensor& grad = parameters_[slot].mutable_grad();
    if (!grad.defined() || !lies_here(grad)) continue;
    if (!holds(slot, grad)) return false;
    visitors.push_back(slot);
  }
  if (static_cast<size_t>(storage_.storage().use_count()) > own_tensors_ + visitors.size()) {
    return false;
  }
  for (const size_t slot : visitors) {
    relocate(parameters_[slot].mutable_grad(), views_[slot].clone());
  }
  return true;
}

bool Bucket::clear_out() {
  if (!holds_owned_gradients()) return false;
  keeps_out_ = true;
  if (move_out()) return false;
  lay_out(make_storage_(numel_ + tail_numel_, storage_.options()));
  return true;
}

std::vector<std::string> Bucket::pack(double scale, const std::vector<char>* used, Unused unused) {
  std::vector<std::string> problems;
  const auto note = [&](std::string problem) {
    if (!problem.empty()) problems.push_back(std::move(problem));
  };
  const auto is_used = [&](size_t slot) { return !used || (*used)[indices_[slot]]; };
  if (sparse_) {
    if (is_used(0) || unused == Unused::Remember) {
      note(pack_sparse(scale));
    } else {
      gradients_ = no_rows(parameters_.front());
    }
    return problems;
  }
  using When = ScaledCopies::When;
  ScaledCopies copies(scale, parameters_.front().is_cpu() ? When::AtOnce : When::Together);
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (!is_used(slot)) set_aside(slot, unused);
    if (!is_used(slot) && unused == Unused::Zero) continue;
    // A rank that has no say (no samples) has none with infinities either.
    if (scale == 0) {
      views_[slot].zero_();
    } else {
      note(pack_one(slot, copies));
    }
  }
  copies.finish();
  return problems;
}

void Bucket::set_aside(size_t slot, Unused unused) {
  const auto& view = views_[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  if (grad.defined() && holds(slot, grad)) remembered_[slot] = view.clone();
  if (unused == Unused::Zero) view.zero_();
}

std::string Bucket::pack_one(size_t slot, ScaledCopies& copies) {
  const auto& view = views_[slot];
  const at::Tensor& grad = parameters_[slot].mutable_grad();
  if (!grad.defined()) {
    view.zero_();
    return {};
  }
  if (holds(slot, grad)) {
    copies.scale(view);
    return {};
  }
  if (is_like(grad, view)) {
    copies.copy(view, grad);
    return {};
  }
  view.zero_();
  return c10::str(
      "expected the gradient of ", names_[slot], " to be ", describe(view), ", as its bucket, got ",
      describe(grad));
}

// Not from memory that other tensors have too, nor from what is not torch's, where somebody wants
// to find the average, nor with a graph (create_graph).
bool Bucket::can_move_in(size_t slot, const at::Tensor& grad) const {
  return grad.nbytes() >= kWorthMoving && grad.strides() == views_[slot].strides() &&
         grad.storage().use_count() == 1 && grad.storage().resizable() && !grad.requires_grad() &&
         !grad.is_neg() && !grad.is_conj();
}

std::string Bucket::pack_sparse(double scale) {
  const auto& parameter = parameters_.front();
  const at::Tensor& grad = parameter.mutable_grad();
  const bool is_sparse = grad.defined() && grad.layout() == at::kSparse;
  // A rank that has no say (no samples) has none with infinities either.
  if (is_sparse && scale != 0) {
    gradients_ = scale == 1.0 ? grad.clone() : grad * scale;
    return {};
  }
  gradients_ = no_rows(parameter);
  return grad.defined() && !is_sparse
             ? c10::str(
                   "expected the gradient of ", names_.front(),
                   " to be sparse, as of an embedding with sparse=true, got ", describe(grad))
             : std::string();
}

void Bucket::unpack(const at::Tensor& reduced, const std::vector<char>& keep) {
  if (sparse_) {
    if (keep.empty() || !keep[indices_.front()]) unpack_sparse(reduced);
    return;
  }
  const bool elsewhere = reduced.const_data_ptr() != storage_.const_data_ptr();
  if (elsewhere && placement_ == Placement::View) gradients_.copy_(reduced);
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    if (!keep.empty() && keep[indices_[slot]]) {
      if (remembered_[slot].defined()) copy_scaled(views_[slot], remembered_[slot], 1.0);
    } else if (placement_ == Placement::View) {
      unpack_view(slot);
    } else {
      unpack_owned(slot, elsewhere ? make_view(reduced, slot) : views_[slot]);
    }
  }
  remembered_.assign(views_.size(), at::Tensor());
}

void Bucket::unpack_view(size_t slot) {
  at::Tensor& grad = parameters_[slot].mutable_grad();
  if (grad.defined() && holds(slot, grad)) return;
  // With create_graph a gradient has a graph of its own, which an alias would cut off.
  if (grad.defined() && grad.requires_grad() && is_like(grad, views_[slot])) {
    overwrite(grad, views_[slot]);
  } else {
    grad = twin(views_[slot]);
  }
}

void Bucket::unpack_owned(size_t slot, const at::Tensor& reduced) {
  at::Tensor& grad = parameters_[slot].mutable_grad();
  const bool is_here = lies_here(reduced) && !keeps_out_;
  if (!grad.defined() || !is_like(grad, reduced)) {
    // One of another kind was a problem, and counted as zeros.
    grad = is_here ? twin(reduced) : reduced.clone();
  } else if (is_here && can_move_in(slot, grad)) {
    relocate(grad, reduced);
    grad.unsafeGetTensorImpl()->bump_version();
  } else {
    overwrite(grad, reduced);
  }
}

void Bucket::unpack_sparse(const at::Tensor& reduced) {
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
