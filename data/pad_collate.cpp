#include <ddp/pad_collate.h>

#include <ATen/core/functional.h>
#include <ATen/ops/pad_sequence.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

/// \param name  "data" or "target".
void check_samples(const char* name, const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    const auto& first = tensors.front();
    DDP_CHECK_VALUE(
        tensor.defined(), "pad_collate: expected ", name, " in every sample, got none in sample ",
        i,
        " of the batch. Use samples without targets, torch::data::TensorExample, where there are "
        "none.");
    const bool fits = tensor.dim() == first.dim() && tensor.scalar_type() == first.scalar_type() &&
                      tensor.device() == first.device() &&
                      (tensor.dim() == 0 || tensor.sizes().slice(1) == first.sizes().slice(1));
    DDP_CHECK_VALUE(
        fits, "pad_collate: expected ", name, " that differs in its first dimension alone, got ",
        first.sizes(), " of ", first.scalar_type(), " on ", first.device(), " in sample 0 and ",
        tensor.sizes(), " of ", tensor.scalar_type(), " on ", tensor.device(), " in sample ", i,
        " of the batch. Let the data set give one dtype, and transpose what is uneven elsewhere.");
  }
}

at::Tensor lengths_of(const std::vector<at::Tensor>& tensors) {
  return at::tensor(
      c10::fmap(tensors, [](const at::Tensor& t) { return t.size(0); }),
      at::TensorOptions().dtype(at::kLong));
}

PaddedBatch padded_data(const std::vector<at::Tensor>& data, double padding_value) {
  DDP_CHECK_VALUE(
      !data.empty(), "pad_collate: expected at least one sample, got none. Skip empty batches.");
  check_samples("data", data);
  DDP_CHECK_VALUE(
      data.front().dim() > 0, "pad_collate: expected data with a dimension to pad, got single ",
      "values. Use torch::data::transforms::Stack for them.");
  PaddedBatch batch;
  batch.data = at::pad_sequence(data, /*batch_first=*/true, padding_value);
  batch.lengths = lengths_of(data);
  return batch;
}

}  // namespace

PaddedBatch pad_collate(
    const std::vector<torch::data::Example<>>& samples, double padding_value,
    double target_padding_value) {
  auto batch = padded_data(c10::fmap(samples, [](const auto& s) { return s.data; }), padding_value);
  const auto targets = c10::fmap(samples, [](const auto& s) { return s.target; });
  check_samples("target", targets);
  if (targets.front().dim() == 0) {
    batch.target = at::stack(targets);
  } else {
    batch.target = at::pad_sequence(targets, /*batch_first=*/true, target_padding_value);
    batch.target_lengths = lengths_of(targets);
  }
  return batch;
}

PaddedBatch pad_collate(
    const std::vector<torch::data::TensorExample>& samples, double padding_value) {
  return padded_data(c10::fmap(samples, [](const auto& s) { return s.data; }), padding_value);
}

}  // namespace ddp
