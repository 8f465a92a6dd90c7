#include "optim/matrix_exchange.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/text.h>

#include "optim/orthogonalize.h"

namespace ddp {
namespace {

constexpr const char* kMuon = "ddp::optim::Muon: ";

int64_t numel_of_boxes(const std::vector<TensorBox>& boxes) {
  int64_t numel = 0;
  for (const auto& box : boxes) numel += c10::multiply_integers(box.size);
  return numel;
}

at::Tensor view_of(const at::Tensor& matrix, const TensorBox& box) {
  return matrix.narrow(0, box.offset[0], box.size[0]).narrow(1, box.offset[1], box.size[1]);
}

/// The multiplications of a step, but for a factor.
int64_t cost_of(const RankedMatrix& matrix) {
  const auto least = std::min(matrix.rows, matrix.columns);
  return (matrix.rows + matrix.columns) * least * least;
}

/// Numbers of a rank's boxes of a matrix, for the other ranks.
std::string written(const std::vector<TensorBox>& boxes) {
  std::string text;
  for (const auto& box : boxes) {
    text += ddp::str(box.offset[0], " ", box.offset[1], " ", box.size[0], " ", box.size[1], " ");
  }
  return text;
}

std::vector<TensorBox> read_boxes(const std::string& line) {
  InputText text(line);
  std::vector<TensorBox> boxes;
  int64_t row = 0, column = 0, rows = 0, columns = 0;
  while (text >> row >> column >> rows >> columns) {
    boxes.push_back({{row, column}, {rows, columns}});
  }
  return boxes;
}

/// \param masks  by rank and matrix: 1 where there is a gradient.
void check_masks(const std::vector<MatrixJob>& jobs, const at::Tensor& masks) {
  const auto on_host = masks.cpu();
  const auto has_gradient = on_host.accessor<float, 2>();
  for (size_t j = 0; j < jobs.size(); ++j) {
    const auto column = static_cast<int64_t>(j);
    int with = -1, without = -1;
    for (int rank = 0; rank < on_host.size(0); ++rank) {
      if (jobs[j].matrix->numel_of(rank) == 0) continue;
      (has_gradient[rank][column] != 0 ? with : without) = rank;
    }
    DDP_CHECK(
        with < 0 || without < 0, kMuon, "expected every rank to have a gradient of \"",
        jobs[j].matrix->name, "\" or none, got one on rank ", with, " and none on rank ", without,
        ". Step after an averaged backward pass, with the same parameters on every rank.");
  }
}

at::ScalarType ns_dtype_of(const std::vector<MatrixJob>& jobs) {
  return jobs.front().options->ns_dtype();
}

}  // namespace

int64_t RankedMatrix::numel_of(int rank) const {
  return is_cut ? numel_of_boxes(boxes_of_ranks[static_cast<size_t>(rank)]) : numel();
}

at::Tensor MatrixJob::own_elements() const {
  if (!matrix->is_cut) return as_matrix(parameter);
  return parameter.view(-1).narrow(0, 0, numel_of_boxes(matrix->boxes));
}

at::Tensor MatrixJob::as_matrix(const at::Tensor& tensor) const {
  const std::vector<int64_t> sizes{matrix->rows, matrix->columns};
  if (tensor.sizes() == at::IntArrayRef(sizes)) return tensor;
  return tensor.view(-1).narrow(0, 0, matrix->numel()).view(sizes);
}

MatrixExchanges::MatrixExchanges(const torch::nn::Module& model, const Groups& groups) {
  std::unordered_map<const void*, ParameterLayout> layouts;
  for (auto& layout : layouts_of(model)) {
    const auto* key = layout.local.unsafeGetTensorImpl();
    layouts.emplace(key, std::move(layout));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& p : groups[g].params()) {
      const auto found = layouts.find(p.unsafeGetTensorImpl());
      DDP_CHECK_VALUE(
          found != layouts.end(), kMuon, "expected parameters of the model, got another one, of ",
          p.sizes(), ", in group ", g, ". Step it with an optimizer of its own.");
      matrix_by_parameter_[p.unsafeGetTensorImpl()] = matrices_.size();
      matrices_.push_back(matrix_of(found->second));
    }
  }
  compare_ranks();
  choose_owners();
}

RankedMatrix MatrixExchanges::matrix_of(const ParameterLayout& layout) {
  DDP_CHECK_VALUE(
      layout.sizes.size() == 2, kMuon, "expected parameters of two dimensions, got \"", layout.name,
      "\" of ", at::IntArrayRef(layout.sizes),
      ". Step it with another optimizer, as AdamW; split_for_muon() tells them apart.");
  DDP_CHECK_VALUE(
      !layout.stage, kMuon, "expected a model that is no pipeline's stage, got \"", layout.name,
      "\" of stage ", layout.stage.value_or(0),
      ". Make it from the parameters, Muon(split_for_muon(*stage).matrices), which every rank then "
      "steps whole.");
  std::vector<ProcessGroup> cut_over;
  for (const auto& group : layout.sharded_over) {
    if (group->getSize() > 1) cut_over.push_back(group);
  }
  DDP_CHECK_VALUE(
      cut_over.size() <= 1, kMuon, "expected \"", layout.name, "\" cut over one group, got ",
      cut_over.size(), ". Cut it along one axis, or step it with another optimizer, as AdamW.");
  RankedMatrix matrix{layout.name, layout.sizes[0],   layout.sizes[1],
                      0,           !cut_over.empty(), layout.boxes};
  DDP_CHECK_VALUE(
      !matrix.is_cut || layout.local.is_contiguous(), kMuon, "expected contiguous parts, got \"",
      layout.name, "\" with strides ", layout.local.strides(), ". Make it contiguous.");
  ProcessGroup group = matrix.is_cut ? cut_over.front() : ProcessGroup();
  for (const auto& replicas : layout.replicated_over) {
    if (matrix.is_cut) break;
    if (!group || replicas->getSize() > group->getSize()) group = replicas;
  }
  matrix.group = index_of(group);
  return matrix;
}

size_t MatrixExchanges::index_of(const ProcessGroup& group) {
  const auto found = std::find(groups_.begin(), groups_.end(), group);
  if (found != groups_.end()) return static_cast<size_t>(found - groups_.begin());
  groups_.push_back(group);
  return groups_.size() - 1;
}

// Each rank learns where the parts of the others are, in the same collective.
void MatrixExchanges::compare_ranks() {
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!groups_[g]) continue;
    std::string text;
    std::vector<RankedMatrix*> own;
    for (auto& matrix : matrices_) {
      if (matrix.group != g) continue;
      own.push_back(&matrix);
      text += ddp::str(matrix.name, " of ", matrix.rows, " x ", matrix.columns, "\n");
      text += matrix.is_cut ? written(matrix.boxes) + "\n" : "\n";
    }
    const auto of_ranks = all_gather_strings(text, groups_[g]);
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const auto first = lines_of(of_ranks.front()), lines = lines_of(of_ranks[rank]);
      for (size_t i = 0; i < std::max(first.size(), lines.size()); i += 2) {
        const std::string expected = i < first.size() ? first[i] : "no matrix";
        const std::string got = i < lines.size() ? lines[i] : "no matrix";
        DDP_CHECK_VALUE(
            expected == got, kMuon,
            "expected every rank to have the same matrices in the same order, got ", expected,
            " on rank 0 and ", got, " on rank ", rank,
            ". Make it from the same parameters on every rank.");
      }
      for (size_t m = 0; m < own.size(); ++m) {
        if (own[m]->is_cut) own[m]->boxes_of_ranks.push_back(read_boxes(lines[2 * m + 1]));
      }
    }
  }
}

// The most expensive ones first, each to the rank that has least to do.
void MatrixExchanges::choose_owners() {
  std::vector<RankedMatrix*> by_cost;
  for (auto& matrix : matrices_) by_cost.push_back(&matrix);
  std::stable_sort(by_cost.begin(), by_cost.end(), [](const auto* a, const auto* b) {
    return cost_of(*a) > cost_of(*b);
  });
  std::vector<std::vector<int64_t>> costs;
  for (const auto& group : groups_) {
    costs.emplace_back(static_cast<size_t>(group ? group->getSize() : 1));
  }
  for (auto* matrix : by_cost) {
    auto& of_group = costs[matrix->group];
    const auto least = std::min_element(of_group.begin(), of_group.end());
    matrix->owner = static_cast<int>(least - of_group.begin());
    *least += cost_of(*matrix);
  }
}

std::map<MatrixExchanges::Key, std::vector<MatrixJob>> MatrixExchanges::jobs_of(
    Groups& groups) const {
  std::map<Key, std::vector<MatrixJob>> jobs;
  for (auto& group : groups) {
    const auto& options = static_cast<const optim::MuonOptions&>(group.options());
    for (const auto& p : group.params()) {
      const auto found = matrix_by_parameter_.find(p.unsafeGetTensorImpl());
      DDP_CHECK(
          found != matrix_by_parameter_.end(), kMuon,
          "expected the parameters that it was made with, got one more, of ", p.sizes(),
          ". Make a new optimizer with all of them.");
      const auto& matrix = matrices_[found->second];
      DDP_CHECK(
          p.numel() >= numel_of_boxes(matrix.boxes) && (matrix.is_cut || p.dim() == 2) &&
              (!p.grad().defined() || p.grad().sizes() == p.sizes()),
          kMuon, "expected parameters as they are between passes, got \"", matrix.name, "\" of ",
          p.sizes(), ". Step outside of SummonFullParams, and after reshard().");
      jobs[{matrix.group, matrix.is_cut, p.device().str(), p.scalar_type(), options.ns_dtype()}]
          .push_back({&matrix, p, &options});
    }
  }
  return jobs;
}

std::vector<ProcessGroup> MatrixExchanges::process_groups() const {
  std::vector<ProcessGroup> groups;
  std::copy_if(groups_.begin(), groups_.end(), std::back_inserter(groups), [](const auto& group) {
    return group != nullptr;
  });
  return groups;
}

void MatrixExchanges::compare_gradients(const std::map<Key, std::vector<MatrixJob>>& jobs) const {
  std::map<size_t, std::vector<MatrixJob>> by_group;
  for (const auto& [key, of_key] : jobs) {
    auto& of_group = by_group[of_key.front().matrix->group];
    of_group.insert(of_group.end(), of_key.begin(), of_key.end());
  }
  for (const auto& [index, of_group] : by_group) {
    const auto& group = groups_[index];
    if (!group || group->getSize() == 1) continue;
    std::vector<float> mask;
    for (const auto& job : of_group) mask.push_back(job.parameter.grad().defined() ? 1 : 0);
    const auto own = at::tensor(mask, at::kFloat).to(of_group.front().parameter.device());
    auto masks = at::empty({group->getSize(), own.numel()}, own.options());
    all_gather_into_tensor(masks, own, group);
    check_masks(of_group, masks);
  }
}

void MatrixExchanges::orthogonalize(std::vector<MatrixJob>& jobs) const {
  if (jobs.front().matrix->is_cut) return orthogonalize_cut(jobs);
  const auto& group = groups_[jobs.front().matrix->group];
  if (group && group->getSize() > 1) return orthogonalize_whole(jobs);
  for (auto& job : jobs) {
    if (!job.update.defined()) continue;
    job.update = ddp::orthogonalize(job.as_matrix(job.update), *job.options);
  }
}

// Every rank has all updates: each sends what it owns to all.
void MatrixExchanges::orthogonalize_whole(std::vector<MatrixJob>& jobs) const {
  const auto& group = groups_[jobs.front().matrix->group];
  const auto ranks = group->getSize();
  std::vector<int64_t> places, filled(static_cast<size_t>(ranks), 0);
  for (const auto& job : jobs) {
    auto& end = filled[static_cast<size_t>(job.matrix->owner)];
    places.push_back(end);
    end += job.matrix->numel();
  }
  const auto width = *std::max_element(filled.begin(), filled.end());
  const auto options =
      jobs.front().parameter.options().dtype(ns_dtype_of(jobs)).requires_grad(false);
  const auto own = at::empty({width}, options);
  const auto place_in = [&](const at::Tensor& memory, size_t j) {
    const auto& matrix = *jobs[j].matrix;
    return memory.narrow(0, places[j], matrix.numel()).view({matrix.rows, matrix.columns});
  };
  for (size_t j = 0; j < jobs.size(); ++j) {
    const bool is_own = jobs[j].matrix->owner == group->getRank();
    if (!is_own || !jobs[j].update.defined()) continue;
    place_in(own, j).copy_(ddp::orthogonalize(jobs[j].as_matrix(jobs[j].update), *jobs[j].options));
  }
  auto all = at::empty({ranks, width}, options);
  all_gather_into_tensor(all, own, group);
  for (size_t j = 0; j < jobs.size(); ++j) {
    if (jobs[j].update.defined()) jobs[j].update = place_in(all[jobs[j].matrix->owner], j);
  }
}

namespace {

/// Elements that go from each rank to each owner, in the order of the jobs.
struct Splits {
  std::vector<int64_t> to_owners;   // of this rank's elements, by owner
  std::vector<int64_t> from_ranks;  // of this rank's matrices, by rank that has the elements
};

Splits splits_of(const std::vector<MatrixJob>& jobs, const c10d::ProcessGroup& group) {
  const auto ranks = static_cast<size_t>(group.getSize());
  Splits splits{std::vector<int64_t>(ranks), std::vector<int64_t>(ranks)};
  for (const auto& job : jobs) {
    const auto& matrix = *job.matrix;
    splits.to_owners[static_cast<size_t>(matrix.owner)] += matrix.numel_of(group.getRank());
    if (matrix.owner != group.getRank()) continue;
    for (size_t r = 0; r < ranks; ++r) splits.from_ranks[r] += matrix.numel_of(static_cast<int>(r));
  }
  return splits;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// Calls `use` with each part of this rank's matrices that a rank has: its matrix, box and elements
/// in `memory`, whose order is that of ranks, matrices and boxes.
template <typename Use>
void for_each_part(
    const std::vector<MatrixJob>& jobs, const c10d::ProcessGroup& group, const at::Tensor& memory,
    const Use& use) {
  int64_t begin = 0;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    for (size_t j = 0; j < jobs.size(); ++j) {
      const auto& matrix = *jobs[j].matrix;
      if (matrix.owner != group.getRank()) continue;
      for (const auto& box : matrix.boxes_of_ranks[static_cast<size_t>(rank)]) {
        const auto numel = c10::multiply_integers(box.size);
        use(j, box, memory.narrow(0, begin, numel).view(box.size));
        begin += numel;
      }
    }
  }
}

}  // namespace

// To each owner this rank's elements of its matrices.
at::Tensor MatrixExchanges::collected_updates(const std::vector<MatrixJob>& jobs) const {
  const auto& group = groups_[jobs.front().matrix->group];
  const auto splits = splits_of(jobs, *group);
  const auto options = jobs.front().parameter.options().requires_grad(false);
  std::vector<at::Tensor> parts;
  for (int owner = 0; owner < group->getSize(); ++owner) {
    for (const auto& job : jobs) {
      if (job.matrix->owner != owner) continue;
      const auto numel = job.matrix->numel_of(group->getRank());
      parts.push_back(
          job.update.defined() ? job.update.reshape(-1).narrow(0, 0, numel)
                               : at::zeros({numel}, options));
    }
  }
  auto received = at::empty({sum_of(splits.from_ranks)}, options);
  all_to_all_single(received, at::cat(parts), splits.from_ranks, splits.to_owners, group);
  return received;
}

void MatrixExchanges::orthogonalize_cut(std::vector<MatrixJob>& jobs) const {
  const auto& group = groups_[jobs.front().matrix->group];
  const auto splits = splits_of(jobs, *group);
  const auto received = collected_updates(jobs);
  std::vector<at::Tensor> wholes(jobs.size());
  for (size_t j = 0; j < jobs.size(); ++j) {
    const auto& matrix = *jobs[j].matrix;
    if (matrix.owner == group->getRank()) {
      wholes[j] = at::empty({matrix.rows, matrix.columns}, received.options());
    }
  }
  for_each_part(jobs, *group, received, [&](size_t j, const auto& box, const auto& part) {
    view_of(wholes[j], box).copy_(part);
  });
  for (size_t j = 0; j < jobs.size(); ++j) {
    if (wholes[j].defined()) wholes[j] = ddp::orthogonalize(wholes[j], *jobs[j].options);
  }
  const auto options = received.options().dtype(ns_dtype_of(jobs));
  auto sent = at::empty({sum_of(splits.from_ranks)}, options);
  for_each_part(jobs, *group, sent, [&](size_t j, const auto& box, const auto& part) {
    part.copy_(view_of(wholes[j], box));
  });
  auto own = at::empty({sum_of(splits.to_owners)}, options);
  all_to_all_single(own, sent, splits.to_owners, splits.from_ranks, group);
  int64_t begin = 0;
  for (int owner = 0; owner < group->getSize(); ++owner) {
    for (auto& job : jobs) {
      if (job.matrix->owner != owner) continue;
      const auto numel = job.matrix->numel_of(group->getRank());
      if (job.update.defined()) job.update = own.narrow(0, begin, numel);
      begin += numel;
    }
  }
}

}  // namespace ddp
