#pragma once

#include <atomic>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>
#include <ddp/reducer.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// The gradients that travel in one collective: flat storage, one view into it per parameter, and
/// what is in flight. Knows nothing of autograd, hooks or other buckets.
///
/// A dense bucket packs its gradients without gaps in `storage()`. A view has its parameter's
/// strides where those are dense, else it is contiguous: autograd's gradient layout contract. A
/// bucket of one sparse parameter has no storage: the gradient itself is sent.
///
/// Threads: `pending` may be counted down from several autograd threads, everything else belongs
/// to the thread that launches or finishes the bucket.
class Bucket {
 public:
  /// What gather() makes of a parameter that got no gradient since the last reduced pass.
  enum class Unused {
    Remember,  // its `.grad` is sent as it is, and may turn out to be no rank's business
    Zero,      // this rank only stands in for one that has no input: zeros
  };

  /// Makes the storage of `numel` elements, 1-D: where a backend can reduce it in place.
  using MakeStorage = c10::function_ref<at::Tensor(int64_t numel, const at::TensorOptions&)>;

  Bucket() = default;

  /// \param indices  places in `parameters`; all of one dtype and device.
  /// \param tail  extra elements of storage behind the gradients, sent along with them.
  Bucket(
      const std::vector<NamedParameter>& parameters, std::vector<size_t> indices, int64_t tail,
      MakeStorage make_storage);
  Bucket(const Bucket&) = delete;
  Bucket& operator=(const Bucket&) = delete;
  Bucket(Bucket&& other) noexcept;

  const std::vector<size_t>& indices() const { return indices_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& views() const { return views_; }
  bool is_sparse() const { return sparse_; }
  /// The gradients, 1-D, without the tail; of a sparse bucket what gather() found.
  const at::Tensor& gradients() const { return gradients_; }
  /// Gradients and tail, 1-D: what is sent.
  const at::Tensor& storage() const { return storage_; }
  /// The extra elements, 1-D.
  const at::Tensor& tail() const { return tail_; }
  /// Of a dense bucket's gradients; 0 for a sparse one, whose size changes.
  int64_t bytes() const { return sparse_ ? 0 : static_cast<int64_t>(gradients_.nbytes()); }

  /// Brings every parameter's `.grad`, times `scale`, into the storage: zeros for an undefined
  /// one, in place for one that already lives there.
  ///
  /// \param used  by parameter, over all buckets. The gradient of one that is not is remembered
  ///        for scatter() to restore. Null: all are used.
  /// \return what is wrong with gradients that cannot travel here, by parameter name; those count
  ///         as zeros, so that the collective still takes place on every rank.
  std::vector<std::string> gather(
      double scale, const std::vector<char>* used = nullptr, Unused unused = Unused::Remember);

  /// Makes every parameter's `.grad` the reduced gradient.
  ///
  /// \param reduced  1-D, what came back; usually gradients() itself.
  /// \param as_views  `.grad` shall alias the storage rather than be copied to.
  /// \param keep  by parameter, over all buckets: leave its `.grad` as it was before gather().
  ///        Empty: none.
  void scatter(const at::Tensor& reduced, bool as_views, const std::vector<char>& keep = {});

  /// Moves the gradients there are, which alias an older bucket's storage, into this one's.
  void adopt_gradients();

  /// Parameters whose gradient is not there yet in this backward pass.
  std::atomic<size_t> pending{0};

  /// In flight: one of the two once launched, none before and after.
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  bool holds(size_t slot, const at::Tensor& grad) const;
  std::string gather_one(size_t slot, double scale);
  void set_aside(size_t slot, Unused unused);
  std::string gather_sparse(double scale);
  void scatter_sparse(const at::Tensor& reduced);
  at::Tensor make_view(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset) const;

  std::vector<size_t> indices_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> views_;
  std::vector<int64_t> offsets_;
  std::vector<const void*> addresses_;  // of the views' first elements
  std::vector<at::Tensor> remembered_;  // gradients in place here that scatter() may restore
  at::Tensor storage_;
  at::Tensor gradients_;
  at::Tensor tail_;
  bool sparse_ = false;
};

}  // namespace ddp
