// Matrices whose updates the ranks of a group make orthogonal together: each rank those that it
// owns.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/muon.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp {

/// A matrix of a model.
struct RankedMatrix {
  std::string name;
  int64_t rows, columns;
  size_t group;  // index of the ranks that share it
  bool is_cut;   // they have parts of it
  std::vector<TensorBox> boxes;
  std::vector<std::vector<TensorBox>> boxes_of_ranks = {};  // where it is cut
  int owner = 0;                                            // rank in the group

  int64_t numel() const { return rows * columns; }
  /// Elements that a rank has.
  int64_t numel_of(int rank) const;
};

/// A matrix in one step.
struct MatrixJob {
  const RankedMatrix* matrix;
  at::Tensor parameter;
  const optim::MuonOptions* options;
  at::Tensor update = {};  // before: in the parameter's shape; undefined where it has no gradient

  /// This rank's elements of the parameter: where it is cut 1-D, without padding.
  at::Tensor own_elements() const;
  /// A tensor of the parameter's shape as the matrix, where this rank has all of it: a unit that
  /// one rank shards is {1, k}.
  at::Tensor as_matrix(const at::Tensor& tensor) const;
};

/// The ranks' ways to share the matrices of one optimizer.
class MatrixExchanges {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  /// By group of ranks, whether they have parts, device, dtype of the parameter and of the steps.
  using Key = std::tuple<size_t, bool, std::string, at::ScalarType, at::ScalarType>;

  /// \throws c10::ValueError  see optim::Muon.
  ///
  /// Collective.
  MatrixExchanges(const torch::nn::Module& model, const Groups& groups);

  /// The groups of ranks.
  std::vector<ProcessGroup> process_groups() const;

  /// The matrices of the groups, in the same order on every rank.
  std::map<Key, std::vector<MatrixJob>> jobs_of(Groups& groups) const;

  /// Throws on every rank alike where some of the ranks that have elements of a matrix have no
  /// gradient of it.
  ///
  /// Collective. Cost: an all-gather of 4 bytes a matrix, for which the host waits.
  void compare_gradients(const std::map<Key, std::vector<MatrixJob>>& jobs) const;

  /// Replaces each update by this rank's elements of the orthogonal one.
  ///
  /// Collective.
  void orthogonalize(std::vector<MatrixJob>& jobs) const;

 private:
  RankedMatrix matrix_of(const ParameterLayout& layout);
  size_t index_of(const ProcessGroup& group);
  void compare_ranks();
  void choose_owners();
  void orthogonalize_whole(std::vector<MatrixJob>& jobs) const;
  void orthogonalize_cut(std::vector<MatrixJob>& jobs) const;
  at::Tensor collected_updates(const std::vector<MatrixJob>& jobs) const;

  std::vector<ProcessGroup> groups_;
  std::vector<RankedMatrix> matrices_;
  std::unordered_map<const void*, size_t> matrix_by_parameter_;
};

}  // namespace ddp
