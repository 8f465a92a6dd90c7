#include "pipeline/microbatches.h"

#include <cstddef>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/autograd.h>

namespace ddp {

Microbatches::Microbatches(
    const char* name, const std::vector<at::Tensor>& tensors, int64_t count, bool fills,
    const std::string& on_rank) {
  const auto first = find_if(tensors, [](const at::Tensor& tensor) { return tensor.defined(); });
  DDP_CHECK_VALUE(
      first != tensors.end(), "PipelineStage: expected ", name,
      " on the stage that uses them, got none ", on_rank, ". Pass the whole batch there.");
  for (const auto& tensor : tensors) {
    auto& parts = parts_.emplace_back(static_cast<size_t>(count));
    if (!tensor.defined()) continue;
    DDP_CHECK_VALUE(
        tensor.dim() > 0 && tensor.size(0) == first->sizes().front(), "PipelineStage: expected ",
        name, " with ", first->dim() > 0 ? first->size(0) : 1, " rows, got ", tensor.sizes(), " ",
        on_rank, ". Dimension 0 is cut into micro-batches.");
    parts = tensor.tensor_split(count, 0);
    if (rows_.empty()) {
      for (const auto& part : parts) rows_.push_back(part.size(0));
    }
    if (!fills) continue;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (rows_[i] == 0) parts[i] = parts[0];
    }
  }
  all_rows_ = first->size(0);
  DDP_CHECK_VALUE(
      fills || all_rows_ >= count, "PipelineStage: expected ", name, " with at least ", count,
      " rows, one for each micro-batch, got ", all_rows_, " ", on_rank,
      ". Choose fewer microbatches, or drop the last batch.");
  DDP_CHECK_VALUE(
      all_rows_ > 0, "PipelineStage: expected ", name, " with at least 1 row, got none ", on_rank,
      ". Leave such a batch out on all ranks.");
}

bool Microbatches::is_filler(int64_t microbatch) const {
  return rows_.at(static_cast<size_t>(microbatch)) == 0;
}

std::vector<at::Tensor> Microbatches::tensors(int64_t microbatch) const {
  return c10::fmap(
      parts_, [&](const auto& parts) { return parts.at(static_cast<size_t>(microbatch)); });
}

double Microbatches::share(int64_t microbatch) const {
  const auto rows = rows_.at(static_cast<size_t>(microbatch));
  return static_cast<double>(rows) / static_cast<double>(all_rows_);
}

at::Tensor joined(const std::vector<at::Tensor>& parts) {
  const auto fits = [&](const at::Tensor& part) {
    return part.defined() && part.dim() == parts[0].dim() &&
           part.scalar_type() == parts[0].scalar_type() &&
           (part.dim() == 0 || part.sizes().slice(1) == parts[0].sizes().slice(1));
  };
  if (parts.empty() || !parts[0].defined() || !all_of(parts, fits)) return at::Tensor();
  return parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts);
}

void backward_through(
    const std::vector<at::Tensor>& tensors, const std::vector<std::vector<at::Tensor>>& parts,
    const std::vector<std::vector<at::Tensor>>& gradients) {
  std::vector<at::Tensor> roots, root_gradients;
  for (size_t k = 0; k < tensors.size(); ++k) {
    const auto has_gradient = [k](const auto& of_part) { return of_part.at(k).defined(); };
    if (none_of(gradients, has_gradient)) continue;
    std::vector<at::Tensor> of_parts;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto& gradient = gradients[i].at(k);
      of_parts.push_back(gradient.defined() ? gradient : at::zeros_like(parts[i].at(k).detach()));
    }
    roots.push_back(tensors[k]);
    root_gradients.push_back(at::cat(of_parts));
  }
  if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
}

}  // namespace ddp
