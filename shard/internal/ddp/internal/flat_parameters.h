// Parameters in flat memory that is cut into a shard for each rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Elements of one tensor, in the order of its memory, that are part of one rank's shard.
struct ShardPiece {
  size_t slot;    // index of the tensor in its layout
  int64_t from;   // first element in the tensor
  int64_t at;     // first element in the shard
  int64_t numel;  // at least 1
};

/// Tensors one after another in a flat one, which is cut into a shard for each rank: with shards of
/// n elements, rank r has elements [r * n, (r + 1) * n). Elements after the last tensor are
/// padding; where tensors stay whole, those after the last tensor of each shard.
struct FlatLayout {
  /// \param numels  the tensors' numbers of elements.
  /// \param multiple  that the elements of a shard are of; of 4 itself.
  FlatLayout(const std::vector<int64_t>& numels, int ranks, int64_t multiple = 4);

  /// The layout of tensors that stay whole, each in one shard, so that the largest shard is small.
  ///
  /// \param loads  by rank: elements that it has elsewhere; where tensors fit several ranks alike,
  ///        the least loaded one gets them. Gets the elements of this layout added.
  static FlatLayout of_whole_tensors(
      const std::vector<int64_t>& numels, std::vector<int64_t>& loads);

  /// Elements of the flat tensor, with padding.
  int64_t numel() const { return shard_numel * ranks; }
  int64_t padding() const;
  std::vector<ShardPiece> pieces(int rank) const;

  std::vector<int64_t> numels;
  std::vector<int64_t> offsets;  // by tensor: its first element
  int ranks;
  int64_t shard_numel;
};

/// Parameters of one dtype and device whose memory is one flat tensor, the whole. Each rank of a
/// group keeps its shard of it up to date, and gathers the others.
class FlatParameters {
 public:
  /// Moves the parameters' values into the whole. Communicates nothing.
  FlatParameters(ProcessGroup group, std::vector<at::Tensor> parameters);
  /// The same with whole parameters in each shard; FlatLayout::of_whole_tensors().
  FlatParameters(
      ProcessGroup group, std::vector<at::Tensor> parameters, std::vector<int64_t>& loads);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// 1-D, of layout().numel() elements.
  const at::Tensor& whole() const { return whole_; }
  /// 1-D, this rank's elements of the whole, in the whole's memory.
  const at::Tensor& shard() const { return shard_; }
  /// The parameters' places in the whole, with their strides.
  const std::vector<at::Tensor>& views() const { return views_; }

  /// Makes a parameter of the shape, dtype and device of its view use the view's memory, with the
  /// value that the parameter has.
  void move_in(size_t i);

  /// Begins to gather the ranks' shards into the whole. The parameters have the values when the
  /// returned work is done.
  ///
  /// Collective. A backend may need a copy of the whole until then.
  c10::intrusive_ptr<c10d::Work> gather_async();

 private:
  FlatParameters(ProcessGroup group, std::vector<at::Tensor> parameters, FlatLayout layout);

  ProcessGroup group_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;
  at::Tensor whole_;
  at::Tensor shard_;
  std::vector<at::Tensor> views_;
};

}  // namespace ddp
