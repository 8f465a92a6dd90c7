#include "differential/plan.h"

#include "differential/training/optimizers.h"

#include <algorithm>
#include <numeric>

namespace ddp::differential {

std::map<std::string, LayerKind>& layer_kinds() {
  static std::map<std::string, LayerKind> all;
  return all;
}

std::vector<Pass> passes_of(const Program& program) {
  const auto& label = program.label("passes");
  if (label == "accumulate" || label == "sync_in_backward") return {{{0}, false}, {{1}}};
  if (label == "two_averaged" || label == "two_forwards") return {{{0}}, {{1}}};
  if (label == "retain_graph") return {{{0}}, {{0}, true, true}};
  if (label == "one_backward") return {{{0, 1}}};
  if (label == "averaged_then_accumulate") return {{{0}}, {{1}, false}, {{2}}};
  return {{{0}}};
}

bool forwards_come_first(const Program& program) {
  return program.is("passes", "sync_in_backward|two_forwards");
}

int reload_step(const Program& program) {
  return program.has("reload") ? 1 : program.number("steps");
}

int ranks_of(const Program& program, int step) {
  const int ranks = program.number("ranks");
  if (step < reload_step(program)) return ranks;
  return program.is("reload", "one_rank")     ? 1
         : program.is("reload", "more_ranks") ? ranks + 1
                                              : ranks;
}

bool is_pipeline(const Program& program, int step) {
  return training_of(program, step) == "pipeline";
}

Axes axes_of(const Program& program, int step) {
  const int ranks = ranks_of(program, step);
  Axes axes;
  const int tp = program.has("mesh") ? program.label("mesh")[2] - '0' : 1,
            dp = program.has("stage") ? 2 : 1;
  if (ranks % tp == 0) axes.tp = tp;
  axes.dp = ranks / axes.tp;
  if (is_pipeline(program, step)) {
    axes.pp = axes.dp % dp == 0 ? axes.dp / dp : axes.dp;
    axes.dp /= axes.pp;
  }
  return axes;
}

std::vector<int64_t> stages_of(const Program& program, int stages) {
  const auto layers = static_cast<int64_t>(program.layers().size());
  std::vector<int64_t> result;
  for (int64_t i = 0; i < layers; ++i) {
    result.push_back(
        program.is("cut", "even")    ? i * stages / layers
        : program.is("cut", "first") ? 0
                                     : stages - 1);
  }
  return result;
}

std::string training_of(const Program& program, int step) {
  const bool other = step >= reload_step(program) && program.has("resumed_as");
  return program.label(other ? "resumed_as" : "training");
}

bool has_input(const Program& program, int step, int rank) {
  if (!program.has("join") || program.is("join", "disabled")) return true;
  // The last rank has one step less, and where there are three steps the one before it, too.
  const int ranks = axes_of(program, step).dp;
  const int less = rank > 0 && rank == ranks - 1 ? 1 : rank > 1 && rank == ranks - 2 ? 2 : 0;
  return step < std::max(0, program.number("steps") - less);
}

std::vector<int64_t> rows_of(const Program& program, int step, int batch) {
  const auto& label = program.label("rows");
  const auto axes = axes_of(program, step);
  const int ranks = axes.pp * axes.dp;
  const int64_t more = is_pipeline(program, step) ? 4 : 0;  // than micro-batches of one row
  std::vector<int64_t> rows(static_cast<size_t>(axes.dp), label == "one" ? 1 : more);
  for (int rank = 0; rank < ranks && label != "one"; ++rank) {
    int64_t own = 3;
    if (label == "uneven") own = 2 + (rank * 2 + step + batch) % 4;
    if (label == "empty_rank" && rank == (step + 1) % ranks) own = ranks == 1 ? 2 : 0;
    if (label == "empty_pass" && batch == 1) own = 0;
    rows[static_cast<size_t>(rank % axes.dp)] += own;
  }
  return rows;
}

int64_t data_seed(int step, int batch, int rank) { return 1000 + 100 * step + 10 * batch + rank; }

bool uses_sometimes(const Program& program, int step, int rank) {
  const auto& label = program.label("unused");
  if (label == "all_ranks") return false;
  if (label == "one_rank") return rank != axes_of(program, step).dp - 1;
  if (label == "by_step") return (step + rank) % 2 == 0;
  return true;
}

bool is_frozen(const Program& program, int step) {
  return program.is("change", "freeze") && step > 0;
}

std::vector<std::vector<size_t>> groups_of(const Program& program, size_t parameters, int step) {
  std::vector<size_t> all(parameters);
  std::iota(all.begin(), all.end(), 0);
  if (program.is("groups", "reversed") || (step > 0 && program.is("groups", "reversed_later")))
    std::reverse(all.begin(), all.end());
  if (!program.is("groups", "two") || parameters < 2) return {all};
  const auto middle = all.begin() + static_cast<long>((parameters + 1) / 2);
  return {{all.begin(), middle}, {middle, all.end()}};
}

void note(Record& record, const std::string& name, const at::Tensor& value) {
  record[name] = value.defined() ? value.detach().to_dense().clone() : at::Tensor();
}

std::vector<torch::optim::OptimizerParamGroup> param_groups(
    const Program& program, const std::vector<at::Tensor>& parameters, int step) {
  std::vector<torch::optim::OptimizerParamGroup> result;
  for (const auto& group : groups_of(program, parameters.size(), step)) {
    std::vector<at::Tensor> members;
    for (const size_t i : group) members.push_back(parameters[i]);
    result.emplace_back(members);
  }
  return result;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& label, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
#define MAKE(name, type, plain, options) \
  if (label == (name)) return std::make_unique<plain>(groups, options);
  DDP_OPTIMIZERS(MAKE)
#undef MAKE
  if (label == "muon") return std::make_unique<ddp::optim::Muon>(groups, DDP_MUON);
  TORCH_CHECK(false, "no optimizer is called ", label);
}

std::vector<at::Tensor> taken_by(
    const Program& program, const std::vector<at::Tensor>& parameters, bool second) {
  std::vector<at::Tensor> result;
  for (const auto& p : parameters) {
    const bool leaves = program.is("optimizer", "muon") && (p.dim() != 2 || !p.requires_grad());
    if (leaves == second) result.push_back(p);
  }
  return result;
}

std::unique_ptr<torch::optim::Optimizer> make_second(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, DDP_REST);
}

double initial_rate(const Program& program) {
  const auto& label = program.label("optimizer");
#define RATE(name, type, plain, options) \
  if (label == (name)) return (options).lr();
  DDP_OPTIMIZERS(RATE)
#undef RATE
  if (label == "muon") return DDP_MUON.lr();
  TORCH_CHECK(false, "no optimizer is called ", label);
}

}  // namespace ddp::differential
