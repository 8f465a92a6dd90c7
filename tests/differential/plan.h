// What a program does, step by step, as both sides read it: the ranks and the reference.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "differential/choice.h"
#include "differential/net.h"

namespace ddp::differential {

/// One backward pass of a step.
struct Pass {
  std::vector<int> batches;  ///< whose losses it goes through, by their number in the step
  bool averaged = true;
  bool again = false;  ///< through a graph that had a backward pass: the same batch once more
};

/// The backward passes of each step, in order.
std::vector<Pass> passes_of(const Program& program);
/// Whether all forward passes of a step come before its first backward pass.
bool forwards_come_first(const Program& program);

/// The ranks that run a step: another number after the checkpoint, where one is loaded by others.
int ranks_of(const Program& program, int step);
/// How the ranks of a step are laid out: stages, replicas, ranks that share layers (the fastest
/// axis).
struct Axes {
  int pp = 1, dp = 1, tp = 1;
};
Axes axes_of(const Program& program, int step);
bool is_pipeline(const Program& program, int step);
/// The stage of each layer in a pipeline.
std::vector<int64_t> stages_of(const Program& program, int stages);

/// The step before which the run ends, and goes on from its checkpoint; the number of steps where
/// none.
int reload_step(const Program& program);
/// How the run trains, before and after that.
std::string training_of(const Program& program, int step);
/// Whether a replica has input for a step (of a join).
bool has_input(const Program& program, int step, int rank);

/// The rows of each replica in a batch, and the number that makes its values.
std::vector<int64_t> rows_of(const Program& program, int step, int batch);
int64_t data_seed(int step, int batch, int rank);

/// Whether a rank's forward uses the layers "sometimes" in a step.
bool uses_sometimes(const Program& program, int step, int rank);
/// Whether parameters of the first layer are frozen in a step.
bool is_frozen(const Program& program, int step);

/// The optimizer's groups: indices of parameters, in the order that an optimizer made at this step
/// gets them.
std::vector<std::vector<size_t>> groups_of(const Program& program, size_t parameters, int step);

/// What one rank, or the reference in its place, had: parameters, gradients, buffers, losses, by
/// name.
using Record = std::map<std::string, at::Tensor>;
void note(Record& record, const std::string& name, const at::Tensor& value);

/// The records of all ranks after the whole program, by one process in double, with LibTorch alone.
/// A noise that is not 0 has it round as the ranks may (rounding.h).
std::vector<Record> reference(const Program& program, uint64_t noise = 0);

DDP_SOURCE(
    loss_of, inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& target, bool mean) {
      const auto sum = (y - target).pow(2).sum();
      return mean ? sum / static_cast<double>(std::max<int64_t>(1, y.size(0))) : sum;
    });
DDP_SOURCE(
    penalty_of, inline at::Tensor penalty_of(const std::vector<at::Tensor>& parameters) {
      auto sum = torch::zeros({}, torch::kDouble);
      for (const auto& p : parameters) {
        if (p.requires_grad()) sum = sum + (p * p.conj()).abs().sum() / 50;
      }
      return sum;
    });
DDP_SOURCE(
    unique,
    /// Without the second occurrences of tied parameters.
    inline std::vector<at::Tensor> unique(const std::vector<at::Tensor>& parameters) {
      std::vector<at::Tensor> result;
      for (const auto& p : parameters) {
        const auto same = [&](const at::Tensor& other) { return other.is_same(p); };
        if (std::none_of(result.begin(), result.end(), same)) result.push_back(p);
      }
      return result;
    });

/// An optimizer of LibTorch by its label, over groups of parameters.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& label, const std::vector<torch::optim::OptimizerParamGroup>& groups);
/// The parameters that the program's optimizer takes, or those that it leaves to a second one: Muon
/// takes matrices.
std::vector<at::Tensor> taken_by(
    const Program& program, const std::vector<at::Tensor>& parameters, bool second = false);
/// The second one.
std::unique_ptr<torch::optim::Optimizer> make_second(const std::vector<at::Tensor>& parameters);
/// The rate with which it begins.
double initial_rate(const Program& program);
/// Groups of parameters, where the second has a learning rate of its own.
std::vector<torch::optim::OptimizerParamGroup> param_groups(
    const Program& program, const std::vector<at::Tensor>& parameters, int step);

}  // namespace ddp::differential
