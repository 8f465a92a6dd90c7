#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>

#include "gradients/bucket_storage.h"
#include "gradients/direct_gradient.h"
#include "gradients/gradient_placement.h"

namespace ddp {

class FiniteCheck;
class ScaledCopies;

/// The gradients that one collective reduces. Independent of autograd, hooks, collectives and other
/// buckets.
///
/// A dense bucket packs its gradients into its BucketStorage, and a GradientPlacement decides what
/// `.grad` is after they are reduced. Large gradients are not packed (DirectGradient), where the
/// group has memory for them. A bucket of one sparse parameter has no storage: the gradient itself
/// is sent.
///
/// Threads: belongs to the thread that launches or finishes the bucket.
class Bucket {
 public:
  /// The values that pack() sends for a parameter without a gradient since the last reduced pass.
  enum class Unused {
    Save,  // its `.grad`; unpack() restores it if no rank used the parameter
    Zero,  // zeros: this rank has joined and has no input
  };

  /// A gradient whose kind (is_like()) differs from that of its parameter in this bucket.
  struct KindMismatch {
    size_t slot;
    std::string difference;  // "Double instead of Float"
  };

  /// \param indices  into `parameters`; all of one dtype and device.
  /// \param tail  extra elements of storage after the gradients, sent along with them.
  /// \param memory  for gradients that are not packed; null: all are packed.
  /// \param slot_bytes  as of BucketStorage.
  Bucket(
      const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
      std::unique_ptr<GradientPlacement> placement, BucketStorage::Allocate allocate,
      const std::shared_ptr<GradientMemory>& memory, int64_t slot_bytes = 1);
  C10_DISABLE_COPY_AND_ASSIGN(Bucket);
  Bucket(Bucket&& other) = default;

  const std::vector<size_t>& indices() const { return indices_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  c10::Device device() const { return parameters_.front().device(); }
  bool is_sparse() const { return sparse_; }
  /// Empty for a sparse bucket, and without memory.
  const BucketStorage& storage() const { return storage_; }
  /// The packed gradients, 1-D, without the tail; of a sparse bucket the gradient that pack() took.
  const at::Tensor& gradients() const { return sparse_ ? packed_ : storage_.gradients(); }
  /// The tensors that collectives send after pack(): the storage, if it is not empty, and then the
  /// gradients that are not packed. As many on every rank.
  std::vector<at::Tensor> wires() const;
  /// The size of a dense bucket's gradients; 0 for a sparse one, whose size changes.
  int64_t bytes() const;
  /// Sizes in bytes of the gradients that are not packed.
  std::vector<size_t> direct_sizes() const;

  /// Gives the bucket its memory; pack() does it where that is missing.
  void allocate();
  /// Frees the memory, but for what gradients that are views into it keep.
  void release();
  /// Before the memory is freed on a device: the current stream may still read gradients that are
  /// views into it, and need not be the one that the memory was made on.
  void record_use() const;
  /// The size of the memory that it has or will have.
  int64_t storage_bytes() const;

  /// Called when this bucket replaces an older one: moves gradients that live in bucket storage
  /// into this one's.
  void move_in();

  /// Copies every parameter's `.grad`, times `scale`, into the storage: zeros for an undefined
  /// one, in place for one that already lies there.
  ///
  /// \param used  by parameter, over all buckets. The gradient of an unused one is saved for
  ///        unpack() to restore. Null: all are used.
  /// \param not_finite  where the indices of parameters whose gradients on the CPU are not finite
  ///        are added; null: nothing looks for them.
  /// \return the gradients of another kind; they count as zeros, so that the collective still runs
  ///         on every rank.
  std::vector<KindMismatch> pack(
      double scale, const std::vector<char>* used = nullptr, Unused unused = Unused::Save,
      std::vector<size_t>* not_finite = nullptr);

  /// Called in place of pack() where the reduced gradients would equal the packed ones: this pass's
  /// unpack() then does nothing.
  ///
  /// \param used  as in pack().
  /// \return false, with nothing done, where unpack() is needed all the same: a gradient lives in
  ///         storage, is missing, or is of another kind than its parameter.
  bool skip_pack(const std::vector<char>* used);

  /// By parameter of the bucket, after pack() or skip_pack(): the gradient that is sent; undefined
  /// where there is none.
  std::vector<at::Tensor> packed_gradients() const;

  /// Makes every parameter's `.grad` the reduced gradient.
  ///
  /// \param reduced  1-D, the reduced packed gradients; usually gradients() itself.
  /// \param keep  by parameter, over all buckets: leave its `.grad` as it was before pack().
  ///        Empty: none.
  void unpack(const at::Tensor& reduced, const std::vector<char>& keep = {});

 private:
  std::vector<KindMismatch> pack_sparse_one(double scale, bool zero);
  std::string pack_one(size_t packed, ScaledCopies& copies);
  ScaledCopies make_copies(double scale, FiniteCheck* check = nullptr) const;
  void prefetch_after(size_t packed) const;
  void save_in_place(size_t packed, Unused unused);

  std::vector<size_t> indices_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  bool sparse_ = false;
  std::map<size_t, DirectGradient> direct_;  // by slot
  std::vector<size_t> packed_slots_;         // all others; the storage has them in this order
  std::vector<at::Tensor> packed_parameters_;
  std::unique_ptr<GradientPlacement> placement_;
  BucketStorage::Allocate allocate_;
  int64_t tail_ = 0;
  int64_t slot_bytes_ = 1;
  BucketStorage storage_;
  std::vector<at::Tensor>
      saved_;                  // by packed slot: a gradient in storage that unpack() may restore
  bool pack_skipped_ = false;  // in the current pass
  at::Tensor packed_;          // the sparse gradient that is sent
};

}  // namespace ddp
