// A collective as one rank calls it, in one form for all of c10d's methods.
#pragma once

#include <chrono>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp {

struct CollectiveCall;

/// The operation that the ranks do together.
enum class CollectiveKind : uint8_t {
  AllReduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  Barrier,
  Reduce,
  Gather,
  Scatter,
  AllToAll,
  /// Not of a Collective: a call whose backward pass is one.
  Differentiable,
  /// Not of a Collective: a send or a recv.
  Message
};

/// One call, normalised:
///
/// | kind | inputs() | outputs() |
/// |---|---|---|
/// | all_reduce, broadcast, reduce | the tensors | the same |
/// | all_gather | one tensor | one of each rank |
/// | gather | one tensor | at the root one of each rank, elsewhere none |
/// | scatter | at the root one for each rank, elsewhere none | one tensor |
/// | reduce_scatter | one for each rank | one tensor |
/// | all_to_all | one for each rank | one of each rank |
/// | barrier | none | none |
///
/// Counts fit the group, and the tensors of a call have one dtype. The tensors of all kinds but
/// all_to_all and reduce_scatter have one number of elements for each rank.
struct DDP_API Collective {
  using Tensors = std::vector<at::Tensor>;  ///< in the order of ranks, where each has one
  using Rows = std::vector<int64_t>;        ///< of the first dimension, by rank

  CollectiveKind kind;                ///< says which members there are
  c10d::OpType type;                  ///< of the method that the caller called
  std::chrono::milliseconds timeout;  ///< c10d::kUnsetTimeout: the group's
  bool is_async = true;               ///< c10d's asyncOp: false lets NCCL use the current stream
  Tensors in = {};                    ///< what the caller gave; empty where whole_in is there
  Tensors out = {};                   ///< the same of whole_out
  at::Tensor whole_in = {};           ///< one tensor that has a part for each rank; contiguous
  at::Tensor whole_out = {};          ///< one tensor that gets a part of each rank; contiguous
  Rows in_rows = {};                  ///< of the parts of whole_in; empty: equally many
  Rows out_rows = {};                 ///< of the parts of whole_out
  c10d::ReduceOp op = c10d::ReduceOp::SUM;  ///< of what reduces
  int root = -1;                            ///< a rank of the group; -1: has none
  int size = 1;                             ///< of the group

  /// `in`, or views of the parts of whole_in. Cost: a view for each rank.
  Tensors inputs() const { return whole_in.defined() ? parts(whole_in, in_rows) : in; }
  /// `out`, or views of the parts of whole_out. Cost: a view for each rank.
  Tensors outputs() const { return whole_out.defined() ? parts(whole_out, out_rows) : out; }
  /// The caller's tensors that get values.
  Tensors results() const;
  /// The first tensor that is sent, or received where this rank sends none. Not of a barrier.
  const at::Tensor& first() const;
  /// The description that is equal on all ranks, if their calls match.
  CollectiveCall described() const;

  /// A call without tensors, from c10d's options of the method.
  template <typename Options>
  static Collective make(CollectiveKind kind, c10d::OpType type, const Options& o, int size) {
    Collective c{kind, type, o.timeout, o.asyncOp};
    if constexpr (HasRoot<Options>::value) c.root = static_cast<int>(o.rootRank);
    if constexpr (HasReduction<Options>::value) c.op = o.reduceOp;
    c.size = size;
    return c;
  }
  /// c10d's options of a method for this call.
  template <typename Options>
  Options options() const {
    Options o;
    o.timeout = timeout;
    o.asyncOp = is_async;
    if constexpr (HasRoot<Options>::value) o.rootRank = root;
    if constexpr (HasReduction<Options>::value) o.reduceOp = op;
    return o;
  }

 private:
  template <typename Options, typename = void>
  struct HasRoot : std::false_type {};
  template <typename Options>
  struct HasRoot<Options, std::void_t<decltype(Options::rootRank)>> : std::true_type {};
  template <typename Options, typename = void>
  struct HasReduction : std::false_type {};
  template <typename Options>
  struct HasReduction<Options, std::void_t<decltype(Options::reduceOp)>> : std::true_type {};

  Tensors parts(const at::Tensor& whole, const Rows& rows) const;
};

namespace detail {

/// Converts the arguments of c10d's methods to a Collective.
///
/// \throws c10::ValueError  where tensors do not fit the group, or each other.
class DDP_API CollectiveForms {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Splits = std::vector<int64_t>;
  using OpType = c10d::OpType;

  CollectiveForms(int rank, int size) : rank_(rank), size_(size) {}

  Collective all_reduce(OpType type, const Tensors& t, const c10d::AllreduceOptions& o) const;
  Collective broadcast(const Tensors& t, const c10d::BroadcastOptions& o) const;
  Collective reduce(const Tensors& t, const c10d::ReduceOptions& o) const;
  Collective all_gather(
      const TensorLists& to, const Tensors& from, const c10d::AllgatherOptions& o) const;
  Collective all_gather(
      const at::Tensor& to, const at::Tensor& from, const c10d::AllgatherOptions& o) const;
  Collective gather(const TensorLists& to, const Tensors& from, const c10d::GatherOptions& o) const;
  Collective scatter(
      const Tensors& to, const TensorLists& from, const c10d::ScatterOptions& o) const;
  Collective reduce_scatter(
      const Tensors& to, const TensorLists& from, const c10d::ReduceScatterOptions& o) const;
  Collective reduce_scatter(
      const at::Tensor& to, const at::Tensor& from, const c10d::ReduceScatterOptions& o) const;
  Collective all_to_all(
      const Tensors& to, const Tensors& from, const c10d::AllToAllOptions& o) const;
  Collective all_to_all(
      const at::Tensor& to, const at::Tensor& from, const Splits& to_splits,
      const Splits& from_splits, const c10d::AllToAllOptions& o) const;

 private:
  void check_one(const char* call, const Tensors& tensors) const;
  void check_root(const char* call, int64_t root) const;
  /// Returns the one list that there has to be, of a tensor for each rank.
  const Tensors& each(const char* call, const TensorLists& lists) const;
  void check_alike(
      const char* call, const Tensors& parts, const at::Tensor& like, int64_t numel) const;
  void check_contiguous(const char* call, const at::Tensor& whole) const;
  void check_rows(const at::Tensor& whole, const Splits& rows) const;
  void check_count(const char* call, const Tensors& tensors) const;
  void check_lists_of(const char* call, bool is_root, size_t lists) const;

  const int rank_, size_;
};

}  // namespace detail

}  // namespace ddp
