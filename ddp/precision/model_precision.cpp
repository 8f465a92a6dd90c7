#include "precision/model_precision.h"

#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using Dtype = std::optional<at::ScalarType>;

void check_dtype(const char* name, const Dtype& dtype) {
  const bool is_known =
      !dtype || *dtype == at::kHalf || *dtype == at::kBFloat16 || *dtype == at::kFloat;
  DDP_CHECK_VALUE(
      is_known, "MixedPrecision: expected ", name, " to be Half, BFloat16 or Float, got ", *dtype,
      ". Leave MixedPrecision out to compute in what the module has.");
}

bool is_low(const Dtype& dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

Dtype reduce_dtype_of(const MixedPrecision& options) {
  return options.reduce_dtype() ? options.reduce_dtype() : options.param_dtype();
}

std::string text_of(const Dtype& dtype) { return dtype ? ddp::str(*dtype) : "unset"; }

}  // namespace

void ModelPrecision::check(const std::vector<NamedParameter>& trained, bool reduces_to_mean) const {
  check_dtype("param_dtype", options_.param_dtype());
  check_dtype("reduce_dtype", options_.reduce_dtype());
  check_dtype("buffer_dtype", options_.buffer_dtype());
  const auto dtype = reduce_dtype_of(options_);
  DDP_CHECK_VALUE(
      reduces_to_mean || !is_low(dtype),
      "MixedPrecision: expected reduction(Reduction::Mean) with a reduction in ", *dtype,
      ", got another one. Set reduce_dtype(torch::kFloat).");
  for (const auto& p : trained) {
    DDP_CHECK_VALUE(
        !p.expect_sparse || !dtype, "MixedPrecision: expected dense gradients, got those of \"",
        p.name, "\", which are sparse. Make the Embedding with sparse(false).");
  }
}

std::string describe(const MixedPrecision& options) {
  return ddp::str(
      "parameters ", text_of(options.param_dtype()), ", reduction ",
      text_of(reduce_dtype_of(options)), ", buffers ", text_of(options.buffer_dtype()));
}

void ModelPrecision::apply_to(const std::vector<StateTensor>& state) {
  std::vector<at::Tensor> parameters;
  for (const auto& s : state) {
    if (s.is_parameter) {
      parameters.push_back(s.tensor);
    } else if (
        options_.buffer_dtype() && s.tensor.is_floating_point() &&
        s.tensor.scalar_type() != *options_.buffer_dtype()) {
      s.tensor.set_data(s.tensor.to(*options_.buffer_dtype()));
      s.tensor.unsafeGetTensorImpl()->bump_version();  // for graphs that saved it
    }
  }
  if (!options_.param_dtype()) return;
  parameters_ = std::make_shared<LowPrecisionParameters>(parameters, *options_.param_dtype());
}

void ModelPrecision::begin_forward() {
  if (parameters_) parameters_->begin_forward();
}

void ModelPrecision::end_forward(const std::vector<at::Tensor>& outputs, bool complete) {
  if (!parameters_) return;
  DDP_CHECK(
      complete || !c10::GradMode::is_enabled(),
      "MixedPrecision: expected forward to return tensors that can be found, got a type without. "
      "Declare visit_tensors() for it (ddp/output_tensors.h), or return the tensors themselves.");
  parameters_->end_forward(outputs);
}

void ModelPrecision::abandon_forward() noexcept {
  if (parameters_) parameters_->abandon_forward();
}

void ModelPrecision::read(
    const std::function<void(const LowPrecisionParameters::ValueOf&)>& read) const {
  if (parameters_) return parameters_->read(read);
  read([](const at::Tensor& tensor) { return tensor.detach(); });
}

void ModelPrecision::end_backward() const noexcept {
  if (parameters_) parameters_->end_backward();
}

void ModelPrecision::with_originals(c10::function_ref<void()> act) const {
  parameters_ ? parameters_->with_originals(act) : act();
}

std::vector<at::Tensor> ModelPrecision::originals(std::vector<at::Tensor> parameters) const {
  return parameters_ ? parameters_->originals(std::move(parameters)) : parameters;
}

std::optional<at::ScalarType> ModelPrecision::reduction_dtype() const {
  const auto dtype = reduce_dtype_of(options_);
  return is_low(dtype) ? dtype : std::nullopt;
}

}  // namespace ddp
