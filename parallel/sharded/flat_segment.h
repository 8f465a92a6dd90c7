#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>
#include <ddp/internal/flat_parameters.h>
#include <ddp/process_group.h>

#include "sharded/copies/host_copies.h"
#include "sharded/copies/quantized_gather.h"

namespace ddp {

/// Parameters of one dtype that lie one after another in a flat tensor, of which each rank of a
/// group keeps its shard. The parameters' data is either their piece of the shard, or their place
/// in the whole flat tensor, whose memory exists while it is needed.
///
/// Autograd saves views of the whole. They share its storage, so that they find the memory of a
/// later gather.
class FlatSegment {
 public:
  struct Form {
    at::ScalarType gathered;     // the dtype of the whole
    bool is_quantized = false;   // in gathers: see QuantizedGather
    bool rests_on_host = false;  // the shard. Nothing where the parameters are there
  };

  /// Copies this rank's elements of the parameters, and points the parameters at them.
  ///
  /// \param group  for gathers.
  /// \param parameters  of one dtype and device.
  ///
  /// Collective: no. Memory: at most one parameter more than before.
  FlatSegment(ProcessGroup group, std::vector<at::Tensor> parameters, const Form& form);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const FlatLayout& layout() const { return layout_; }
  at::IntArrayRef sizes_of(size_t slot) const { return views_[slot].sizes(); }
  at::ScalarType dtype() const { return shard_.scalar_type(); }
  size_t element_size() const { return whole_.element_size(); }
  /// Device of the whole, where the parameters are used.
  c10::Device device() const { return whole_.device(); }
  /// Device of the shard and of its gradients.
  c10::Device shard_device() const { return shard_.device(); }
  bool rests_on_host() const { return shard_device() != device(); }
  /// The elements of a parameter in this rank's shard; possibly none.
  struct Range {
    int64_t from = 0;  // first element in the parameter
    int64_t at = 0;    // first element in the shard
    int64_t numel = 0;
  };
  const Range& range_of(size_t slot) const { return ranges_[slot]; }
  /// The sizes of a parameter's piece: as many dimensions as the parameter has, all but the last of
  /// size 1.
  std::vector<int64_t> piece_sizes(size_t slot) const;
  /// A parameter's elements of a tensor that lies as the shard does, from its element `begin` on.
  /// No autograd view.
  at::Tensor piece(size_t slot, const at::Tensor& flat, int64_t begin = 0) const;

  /// Starts to gather the ranks' shards.
  ///
  /// \param exactly  also where gathers are quantized.
  ///
  /// Collective: yes. Blocks: no.
  void begin_gather(bool exactly);
  /// Has them in the whole.
  void end_gather();
  /// The bytes of the gather that has begun.
  int64_t gather_bytes() const;
  /// Whether the whole, or a gather, has values that were quantized.
  bool is_rounded() const { return quantized_ && quantized_->is_used(); }
  /// Waits until a gather has read a shard on the host, which the program may write from then on.
  void await_upload() { uploaded_.await(); }
  /// Whether a parameter is where the program finds it: on the shard's device while it is one.
  bool is_in_place(size_t slot) const;
  /// Frees the memory of the whole. The parameters' sizes stay as they are.
  void release();
  /// Leaves the memory of the whole to values that were computed from it, and takes other memory
  /// for the next gather. The parameters are shards.
  void part_with_whole();
  void point_at_whole();
  void point_at_shard();
  /// Whether a program wrote to a parameter since it was made whole, and did not keep it.
  bool is_written() const;
  /// A hash of the whole parameters' bytes; 0 on a device, where the host would wait for them.
  uint64_t hash_of_whole() const;
  /// Copies this rank's elements of the whole into the shard.
  void write_back();
  bool has_memory_of(const at::Tensor& tensor) const { return tensor.is_alias_of(whole_); }

  /// The accumulator of a parameter, which takes gradients of the whole's sizes and dtype. Null for
  /// a parameter that requires no gradient.
  const NodePtr& accumulator(size_t slot);
  /// Takes gradients of the parameter as a shard, in place of an accumulator.
  void set_shard_node(size_t slot, NodePtr node);
  const NodePtr& shard_node(size_t slot) const { return shard_nodes_[slot]; }
  /// Whether a graph that exists computed with the parameter as a shard.
  bool is_shard_used(size_t slot) const;

 private:
  void point(size_t slot, const at::Tensor& data, const NodePtr& node);
  void begin_upload(bool exactly);
  void gather_from(const at::Tensor& shard, bool exactly);
  void refill();

  ProcessGroup group_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;
  std::vector<Range> ranges_;
  at::Tensor shard_;
  at::Tensor whole_;
  std::vector<at::Tensor> views_;  // by slot: its place in the whole
  // By slot, what takes gradients of the whole and of the shard; set_data() may drop the
  // parameter's reference.
  std::vector<NodePtr> accumulators_, shard_nodes_;
  std::vector<int64_t> kept_;  // by slot: the version whose values the shard has
  // During a gather: the shard on the device, and that in the whole's dtype.
  at::Tensor risen_, sent_;
  CopyEnd uploaded_;
  std::optional<QuantizedGather> quantized_;
  c10::intrusive_ptr<c10d::Work> gather_;
};

}  // namespace ddp
