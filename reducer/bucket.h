#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>

namespace ddp {

class ScaledCopies;

/// The gradients that travel in one collective: flat storage, and one view into it per parameter.
/// Knows nothing of autograd, hooks, collectives or other buckets.
///
/// A dense bucket packs its gradients without gaps in `storage()`. A view has its parameter's
/// strides where those are dense, else it is contiguous: autograd's gradient layout contract. A
/// bucket of one sparse parameter has no storage: the gradient itself is sent.
///
/// Large gradients are not copied out: unpack() moves their tensors into the storage. With
/// `Placement::Owned` their values are those of gradients with memory of their own: one that has
/// another view is copied to instead; gradients that are still there when the next pass gathers
/// move out first; and storage in which somebody else holds an older gradient is left to them. What
/// shows is where the memory lies: a raw pointer into a gradient is good until the end of the pass,
/// and `storage()` is the whole bucket's.
///
/// Threads: belongs to the thread that launches or finishes the bucket.
class Bucket {
 public:
  /// What pack() makes of a parameter that got no gradient since the last reduced pass.
  enum class Unused {
    Remember,  // its `.grad` is sent as it is, and may turn out to be no rank's business
    Zero,      // this rank only stands in for one that has no input: zeros
  };

  /// Where gradients are between two passes, and what a user may do with that.
  enum class Placement {
    Owned,  // nothing: it is as if they had memory of their own
    View,   // rely on their memory being the storage's (gradient_as_bucket_view)
  };

  /// Makes the storage of `numel` elements, 1-D: where a backend can reduce it in place.
  using MakeStorage = std::function<at::Tensor(int64_t numel, const at::TensorOptions&)>;

  Bucket() = default;

  /// \param indices  places in `parameters`; all of one dtype and device.
  /// \param tail  extra elements of storage behind the gradients, sent along with them.
  Bucket(
      const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
      Placement placement, MakeStorage make_storage);
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  Bucket(Bucket&& other) = default;

  const std::vector<size_t>& indices() const { return indices_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& views() const { return views_; }
  bool is_sparse() const { return sparse_; }
  /// The gradients, 1-D, without the tail; of a sparse bucket what pack() found.
  const at::Tensor& gradients() const { return gradients_; }
  /// Gradients and tail, 1-D.
  const at::Tensor& storage() const { return storage_; }
  /// The same as it is sent: in real numbers.
  const at::Tensor& wire() const { return wire_; }
  /// The extra elements, 1-D.
  const at::Tensor& tail() const { return tail_; }
  /// Of a dense bucket's gradients; 0 for a sparse one, whose size changes.
  int64_t bytes() const { return sparse_ ? 0 : static_cast<int64_t>(gradients_.nbytes()); }

  /// From now on, gradients are copied out: somebody else sees the storage.
  void keep_out() { keeps_out_ = true; }
  /// Gradients that are visitors get memory of their own, if nobody else has tensors here.
  ///
  /// \return whether nothing is left but the bucket's own.
  bool move_out();
  /// To be called before pack(): what would not move out keeps the storage, and the bucket takes
  /// another. If there was anybody, gradients are copied out from then on.
  ///
  /// \return whether it did; its tail is another then.
  bool clear_out();

  /// Brings every parameter's `.grad`, times `scale`, into the storage: zeros for an undefined
  /// one, in place for one that already lives there.
  ///
  /// \param used  by parameter, over all buckets. The gradient of one that is not is remembered
  ///        for unpack() to restore. Null: all are used.
  /// \return what is wrong with gradients that cannot travel here, by parameter name; those count
  ///         as zeros, so that the collective still takes place on every rank.
  std::vector<std::string> pack(
      double scale, const std::vector<char>* used = nullptr, Unused unused = Unused::Remember);

  /// Makes every parameter's `.grad` the reduced gradient.
  ///
  /// \param reduced  1-D, what came back; usually gradients() itself.
  /// \param keep  by parameter, over all buckets: leave its `.grad` as it was before pack().
  ///        Empty: none.
  void unpack(const at::Tensor& reduced, const std::vector<char>& keep = {});

  /// Moves the gradients there are, which alias an older bucket's storage, into this one's.
  void adopt_gradients();

 private:
  bool holds_owned_gradients() const;
  void lay_out(const at::Tensor& storage);
  bool lies_here(const at::Tensor& t) const;
  bool holds(size_t slot, const at::Tensor& grad) const;
  bool can_move_in(size_t slot, const at::Tensor& grad) const;
  std::string pack_one(size_t slot, ScaledCopies& copies);
  void set_aside(size_t slot, Unused unused);
  std::string pack_sparse(double scale);
  void unpack_sparse(const at::Tensor& reduced);
  at::Tensor make_view(const at::Tensor& flat, size_t slot) const;
  void unpack_view(size_t slot);
  void unpack_owned(size_t slot, const at::Tensor& reduced);

  Placement placement_ = Placement::Owned;
  // Gradients stay outside: where they outlive passes that costs less than to move them out.
  bool keeps_out_ = false;
  MakeStorage make_storage_;
  std::vector<size_t> indices_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> views_;
  std::vector<int64_t> offsets_;
  std::vector<const void*> addresses_;  // of the views' first elements
  std::vector<at::Tensor> remembered_;  // gradients in place here that unpack() may restore
  int64_t numel_ = 0;                   // of the gradients
  int64_t tail_numel_ = 0;
  size_t own_tensors_ = 0;  // that lie in the storage
  at::Tensor storage_;
  at::Tensor gradients_;
  at::Tensor tail_;
  at::Tensor wire_;
  bool sparse_ = false;
};

}  // namespace ddp
