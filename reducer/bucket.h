#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>

#include "bucket_storage.h"
#include "direct_gradient.h"
#include "gradient_placement.h"

namespace ddp {

class ScaledCopies;

/// The gradients that travel in one collective. Knows nothing of autograd, hooks, collectives or
/// other buckets.
///
/// A dense bucket packs its gradients into its BucketStorage, and a GradientPlacement says what
/// becomes of `.grad` when they are reduced; but large ones travel alone (DirectGradient), where
/// the group has memory for that. A bucket of one sparse parameter has no storage: the gradient
/// itself is sent.
///
/// Threads: belongs to the thread that launches or finishes the bucket.
class Bucket {
 public:
  /// What pack() makes of a parameter that got no gradient since the last reduced pass.
  enum class Unused {
    Remember,  // its `.grad` is sent as it is, and may turn out to be no rank's business
    Zero,      // this rank only stands in for one that has no input: zeros
  };

  /// A gradient of another kind than its place here.
  struct Misfit {
    size_t slot;
    std::string difference;  // "Double instead of Float"
  };

  /// \param indices  places in `parameters`; all of one dtype and device.
  /// \param tail  extra elements of storage behind the gradients, sent along with them.
  /// \param memory  for gradients that travel alone; null: none does.
  Bucket(
      const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
      std::unique_ptr<GradientPlacement> placement, const BucketStorage::Allocate& allocate,
      const std::shared_ptr<GradientMemory>& memory);
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  Bucket(Bucket&& other) = default;

  const std::vector<size_t>& indices() const { return indices_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  bool is_sparse() const { return sparse_; }
  /// Empty for a sparse bucket.
  const BucketStorage& storage() const { return storage_; }
  /// The packed gradients, 1-D, without the tail; of a sparse bucket what pack() found.
  const at::Tensor& gradients() const { return sparse_ ? packed_ : storage_.gradients(); }
  /// What collectives send, behind pack(): the storage, where there is anything in it, and then the
  /// gradients that travel alone. As many on every rank.
  std::vector<at::Tensor> wires() const;
  /// Of a dense bucket's gradients; 0 for a sparse one, whose size changes.
  int64_t bytes() const;
  /// Sizes in bytes of the gradients that travel alone.
  std::vector<size_t> direct_sizes() const;

  /// In place of an older bucket: gradients that belong into storage move into this one's.
  void move_in();

  /// Brings every parameter's `.grad`, times `scale`, into the storage: zeros for an undefined
  /// one, in place for one that already lies there.
  ///
  /// \param used  by parameter, over all buckets. The gradient of one that is not is remembered
  ///        for unpack() to restore. Null: all are used.
  /// \return the gradients that cannot travel here; those count as zeros, so that the collective
  ///         still takes place on every rank.
  std::vector<Misfit> pack(
      double scale, const std::vector<char>* used = nullptr, Unused unused = Unused::Remember);

  /// In place of pack(), where the gradients would come back as they are: leaves them where they
  /// are, and so will unpack().
  ///
  /// \param used  as in pack().
  /// \return false, with nothing done, where unpack() has something to do all the same: a gradient
  ///         that belongs into storage, that is missing, or of another kind than its place here.
  bool leave_alone(const std::vector<char>* used);

  /// Makes every parameter's `.grad` the reduced gradient.
  ///
  /// \param reduced  1-D, what came back of the packed ones; usually gradients() itself.
  /// \param keep  by parameter, over all buckets: leave its `.grad` as it was before pack().
  ///        Empty: none.
  void unpack(const at::Tensor& reduced, const std::vector<char>& keep = {});

 private:
  std::vector<Misfit> pack_sparse_one(double scale, bool zero);
  std::string pack_one(size_t packed, ScaledCopies& copies);
  void prefetch_after(size_t packed) const;
  void set_aside(size_t packed, Unused unused);

  std::vector<size_t> indices_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  bool sparse_ = false;
  std::map<size_t, DirectGradient> direct_;  // by slot
  std::vector<size_t> packed_slots_;         // the others'; the storage has them in this order
  std::vector<at::Tensor> packed_parameters_;
  std::unique_ptr<GradientPlacement> placement_;
  BucketStorage storage_;
  std::vector<at::Tensor> remembered_;  // packed gradients in place that unpack() may restore
  bool left_alone_ = false;             // in the pass that was begun last
  at::Tensor packed_;                   // the sparse gradient that is sent
};

}  // namespace ddp
