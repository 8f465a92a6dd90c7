#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/listed_optimizer.h>
#include <ddp/detail/zero_types.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

namespace ddp {
class MatrixExchanges;
}

namespace ddp::optim {

/// Options for `Muon`.
struct DDP_API MuonOptions : detail::ListedOptions<MuonOptions> {
  /// Sets the learning rate.
  MuonOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT: implicit, as LibTorch's
  /// The coefficients of a Newton-Schulz step.
  using Coefficients = std::tuple<double, double, double>;

  /// The learning rate. Default: 0.001
  TORCH_ARG(double, lr);
  /// The decay of the parameters, as AdamW's. Default: 0.1
  TORCH_ARG(double, weight_decay) = 0.1;
  /// Default: 0.95
  TORCH_ARG(double, momentum) = 0.95;
  /// Default: true
  TORCH_ARG(bool, nesterov) = true;
  /// Default: 3.4445, -4.775, 2.0315
  TORCH_ARG(Coefficients, ns_coefficients) = {3.4445, -4.775, 2.0315};
  /// The least norm by which an update is divided. Default: 1e-7
  TORCH_ARG(double, eps) = 1e-7;
  /// Newton-Schulz steps, less than 100. Default: 5
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// "original": lr * sqrt(max(1, rows / columns)); "match_rms_adamw": 0.2 * lr * sqrt(max(rows,
  /// columns)), with AdamW's rates. Default: "original"
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn) = {};
  /// In which the Newton-Schulz steps compute: at::kBFloat16, kFloat or kDouble. Python has no such
  /// option. Default: at::kBFloat16
  TORCH_ARG(at::ScalarType, ns_dtype) = at::kBFloat16;
};

/// A parameter's state in `Muon`.
struct DDP_API MuonParamState : detail::ListedState<MuonParamState, MuonOptions> {
  /// The sum of gradients, decayed by momentum.
  TORCH_ARG(at::Tensor, momentum_buffer);
};

/// Momentum whose updates of matrices are made orthogonal by Newton-Schulz steps (Jordan et al.,
/// 2024, https://kellerjordan.github.io/posts/muon/). Names, defaults and, on a CPU, bits are those
/// of Python's.
///
/// It takes matrices. Step the others, and embeddings and the last layer, with another optimizer:
/// ```
/// auto parameters = ddp::optim::split_for_muon(*model);
/// ddp::optim::Muon muon(*model, {parameters.matrices});
/// ddp::optim::AdamW rest(parameters.others);
/// ```
/// Made from parameters alone it steps whole matrices, and communicates nothing: each rank computes
/// the same. Made from a model it divides the work: each rank makes its share of the updates
/// orthogonal, and sends them to the others. Of a `FullyShardedDataParallel`, and of layers that
/// are cut over ranks, it gathers each matrix's update on one rank. In a ZeroRedundancyOptimizer
/// each rank steps whole matrices of its own.
///
/// Made from a model it takes gradients that are averaged: each matrix follows its owner's gradient
/// alone. With gradients of each rank's own (PostLocalSGDOptimizer, PeriodicModelAverager, DiLoCo,
/// a step after passes in no_sync()) make it from parameters. So, too, in Elastic, and in a join()
/// whose ranks have uneven inputs, unless the model steps it in backward.
///
/// Source: torch.optim.Muon, torch 2.11.0, which computes all on every rank, and takes no shards.
class DDP_API Muon : public detail::ListedOptimizer<MuonOptions, MuonParamState> {
 public:
  /// Whole matrices.
  ///
  /// \throws c10::ValueError  a parameter that is no matrix; an option outside of its range.
  ///
  /// Collective: no, and step() is not.
  explicit Muon(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const MuonOptions& defaults = {});
  /// One group.
  explicit Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults = {});

  /// All matrices of a model that require a gradient, which its ranks step together.
  ///
  /// \param model  a DistributedDataParallel, a FullyShardedDataParallel, or a module with layers
  ///        that are cut over one group.
  /// \throws c10::ValueError  also for matrices that ranks have in different order or shapes, on
  ///         every rank; a matrix that is cut over two groups; a pipeline's stage.
  ///
  /// Collective: yes, and so is step(), over the ranks that share the matrices.
  explicit Muon(const torch::nn::Module& model, const MuonOptions& defaults = {});
  /// Some matrices of a model, in groups with options of their own.
  Muon(
      const torch::nn::Module& model, const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const MuonOptions& defaults = {});
  /// Whole matrices in flat memory, for ZeroRedundancyOptimizer.
  Muon(
      const std::vector<torch::optim::OptimizerParamGroup>& groups, detail::WholeTensors places,
      const MuonOptions& defaults);
  ~Muon() override;

  /// Steps the matrices that have a gradient.
  ///
  /// \param closure  runs before the step, with gradients.
  /// \throws c10::ValueError  a sparse gradient or a complex parameter; a part of a parameter, of a
  ///         fully sharded model or of a layer that is cut over ranks, where this was made from
  ///         parameters alone; a group of add_param_group() that the constructor would refuse.
  /// \throws c10::Error  a matrix that has a gradient on some of the ranks alone, on every rank; in
  ///         a join() that goes on without a rank's input, where ranks step together.
  /// No parameter or state has changed then.
  ///
  /// Blocks: host, where ranks step together. Cost: about 10 (rows + columns) min(rows, columns)^2
  ///   a Newton-Schulz step, of the rank's share; each update is sent once in ns_dtype, and for
  ///   shards once more in the parameters' dtype; before them 4 bytes a matrix.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// The groups of ranks that step() communicates over, which it keeps; none where it was made from
  /// parameters alone. Collective: no.
  std::vector<ProcessGroup> process_groups() const;

 private:
  void check_groups();
  at::Tensor shaped(const at::Tensor& parameter, const at::Tensor& tensor) const;
  at::Tensor averaged(const MuonOptions& options, const at::Tensor& parameter);
  void step_alone(const MuonOptions& options, const at::Tensor& parameter);
  void step_together();

  detail::WholeTensors places_;
  std::unique_ptr<MatrixExchanges> together_;  // made from a model
};

/// A model's parameters that require a gradient, by whether Muon takes them.
struct MuonSplit {
  std::vector<at::Tensor> matrices;  ///< of two dimensions, also where this rank has a part
  std::vector<at::Tensor> others;    ///< the rest
};

/// Splits the parameters of a model, also of one that is cut over ranks, where shards have other
/// shapes. Embeddings are matrices, too. Collective: no.
DDP_API MuonSplit split_for_muon(const torch::nn::Module& model);

}  // namespace ddp::optim

namespace ddp::detail {

template <>
struct ZeroTypes<optim::Muon>
    : KnownZeroTypes<optim::MuonOptions, optim::MuonParamState, /*need_whole_tensors=*/true> {};

}  // namespace ddp::detail
