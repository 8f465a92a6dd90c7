#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/flat_layout.h>
#include <ddp/process_group.h>

namespace ddp {

/// Parameters of one dtype and device whose memory is one flat tensor, the whole. Each rank of a
/// group keeps its shard of it up to date, and gathers the others.
class FlatParameters {
 public:
  /// Moves the parameters' values into the whole. Communicates nothing.
  FlatParameters(ProcessGroup group, std::vector<at::Tensor> parameters);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  /// 1-D, of layout().numel() elements.
  const at::Tensor& whole() const { return whole_; }
  /// 1-D, this rank's elements of the whole; in the whole's memory until the first release().
  const at::Tensor& shard() const { return shard_; }
  /// The parameters' places in the whole, with their strides.
  const std::vector<at::Tensor>& views() const { return views_; }

  /// Makes a parameter of the shape, dtype and device of its view use the view's memory, with the
  /// value that the parameter has.
  void move_in(size_t i);

  /// Begins to gather the ranks' shards into the whole, whose memory it allocates after a
  /// release(). The parameters have the values when the returned work is done.
  ///
  /// Collective. A backend may need a copy of the whole until then.
  c10::intrusive_ptr<c10d::Work> gather_async();
  /// Frees the memory of the whole. Until it is gathered again, nothing may read parameters that
  /// use it. The first call moves the shard out of the whole, to which earlier views of the shard
  /// still refer.
  void release();

 private:
  ProcessGroup group_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;
  at::Tensor whole_;
  at::Tensor shard_;
  std::vector<at::Tensor> views_;
};

}  // namespace ddp
