#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/move_tensors.h>
#include <torch/data/example.h>
#include <torch/data/transforms/base.h>

namespace ddp {

/// A batch of samples of uneven length.
struct PaddedBatch {
  at::Tensor data;            ///< [N, T, ...], where T is the length of the longest sample
  at::Tensor lengths;         ///< [N] int64: of the samples before they were padded
  at::Tensor target;          ///< [N, ...], padded where the targets have dimensions; else [N]
  at::Tensor target_lengths;  ///< [N] int64; undefined where targets are single values, or none
};

/// Copies the batch to a device, for loaders: the lengths too. Functions that take lengths on the
/// CPU, as pack_padded_sequence does, get `lengths.cpu()`.
inline PaddedBatch move_tensors(const PaddedBatch& batch, const TensorMove& to) {
  return {to(batch.data), to(batch.lengths), to(batch.target), to(batch.target_lengths)};
}
/// The number of samples.
inline size_t batch_size(const PaddedBatch& batch) {
  return static_cast<size_t>(batch.data.size(0));
}

/// Makes a batch of samples whose first dimension differs: pads each to the longest one, at its
/// end.
///
/// \param samples  not empty; data [T_i, ...], of one dtype, and equal sizes but for the first.
///        Targets as well, or all without dimensions.
/// \param padding_value  of the data.
/// \param target_padding_value  of the targets; by default `ignore_index` of cross_entropy.
/// \throws c10::ValueError  naming the sample that does not fit the first.
///
/// Collective: no. Cost: a copy. Source: torch.nn.utils.rnn.pad_sequence, torch 2.11.0.
DDP_API PaddedBatch pad_collate(
    const std::vector<torch::data::Example<>>& samples, double padding_value = 0,
    double target_padding_value = -100);
/// The same of samples without targets: those of the batch are undefined.
DDP_API PaddedBatch
pad_collate(const std::vector<torch::data::TensorExample>& samples, double padding_value = 0);

/// `pad_collate` as a transform, in the place of `Stack`.
///
/// \tparam Sample  `Example<>` or `TensorExample`.
///
/// Example:
/// ```
/// auto loader = torch::data::make_data_loader(dataset.map(ddp::PadCollate<>()), sampler, 64);
/// ```
template <typename Sample = torch::data::Example<>>
class PadCollate
    : public torch::data::transforms::BatchTransform<std::vector<Sample>, PaddedBatch> {
 public:
  /// See `pad_collate`.
  explicit PadCollate(double padding_value = 0, double target_padding_value = -100)
      : padding_value_(padding_value), target_padding_value_(target_padding_value) {}

  /// Makes the batch.
  PaddedBatch apply_batch(std::vector<Sample> samples) override {
    if constexpr (std::is_void_v<typename Sample::TargetType>) {
      return pad_collate(samples, padding_value_);
    } else {
      return pad_collate(samples, padding_value_, target_padding_value_);
    }
  }

 private:
  double padding_value_, target_padding_value_;
};

}  // namespace ddp
