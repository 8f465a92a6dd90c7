#include "backends/mpi/operations/operation.h"

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/check.h>

#include "backends/mpi/channel.h"

namespace ddp::backends::mpi {
namespace {

/// Describes a rank's tensor: sent before the elements.
using Header = std::array<int64_t, 2>;  // sparse dimensions, elements

class SparseReduction : public Operation {
 public:
  SparseReduction(at::Tensor tensor, Tags tags) : tensor_(std::move(tensor)), tags_(tags) {}

  bool advance() override {
    has_moved_ = false;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!headers_sent_) post_headers();
    if (!headers_sent_->are_over()) return false;
    if (!elements_sent_) post_elements();
    if (!elements_sent_->are_over()) return false;
    add_up();
    return true;
  }

 private:
  void post_headers() {
    has_moved_ = true;
    own_ = tensor_.coalesce();
    headers_.resize(static_cast<size_t>(channel->size));
    header_of(channel->rank) = {own_.sparse_dim(), own_._nnz()};
    headers_sent_.emplace(channel->collectives);
    for_others([&](int rank) {
      headers_sent_->receive(header_of(rank).data(), sizeof(Header), rank, tags_.data);
    });
    for_others([&](int rank) {
      headers_sent_->send(header_of(channel->rank).data(), sizeof(Header), rank, tags_.data);
    });
  }

  void post_elements() {
    has_moved_ = true;
    elements_sent_.emplace(channel->collectives);
    for (int rank = 0; rank < channel->size; ++rank) {
      const auto [dimensions, elements] = header_of(rank);
      // The ranks no longer agree on what comes next: the error ends the group.
      DDP_CHECK(
          dimensions == own_.sparse_dim(), "all_reduce: expected sparse tensors with ",
          own_.sparse_dim(), " sparse dimensions, as on rank ", channel->rank, ", got ", dimensions,
          " on rank ", rank, ". Make them alike");
      parts_.push_back(
          rank == channel->rank ? Part{own_._indices().contiguous(), own_._values().contiguous()}
                                : empty_part(elements));
    }
    for_others([&](int rank) {
      for (const auto& memory : parts_[static_cast<size_t>(rank)]) {
        elements_sent_->receive(memory.mutable_data_ptr(), memory.nbytes(), rank, tags_.results);
      }
    });
    for_others([&](int rank) {
      for (const auto& memory : parts_[static_cast<size_t>(channel->rank)]) {
        elements_sent_->send(memory.const_data_ptr(), memory.nbytes(), rank, tags_.results);
      }
    });
  }

  void add_up() {
    at::Tensor sum;
    for (const auto& [indices, values] : parts_) {
      const auto part = at::_sparse_coo_tensor_unsafe(indices, values, own_.sizes(), own_.options())
                            ._coalesced_(true);
      sum = sum.defined() ? sum + part : part;
    }
    tensor_.copy_(sum);
  }

  using Part = std::array<at::Tensor, 2>;  // indices, values

  Part empty_part(int64_t elements) const {
    auto shape = own_._values().sizes().vec();
    shape[0] = elements;
    return {
        at::empty({own_.sparse_dim(), elements}, own_._indices().options()),
        at::empty(shape, own_._values().options())};
  }

  Header& header_of(int rank) { return headers_[static_cast<size_t>(rank)]; }

  template <typename Call>
  void for_others(const Call& call) const {
    for (int rank = 0; rank < channel->size; ++rank) {
      if (rank != channel->rank) call(rank);
    }
  }

  const at::Tensor tensor_;
  const Tags tags_;
  at::Tensor own_;
  std::vector<Header> headers_;
  std::vector<Part> parts_;
  std::optional<Transfers> headers_sent_;
  std::optional<Transfers> elements_sent_;
};

}  // namespace

OperationPtr make_sparse_reduction(const at::Tensor& tensor, Tags tags) {
  return std::make_unique<SparseReduction>(tensor, tags);
}

}  // namespace ddp::backends::mpi
