#include "local_sgd/diloco/fragments.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/FunctionRef.h>

namespace ddp {
namespace {

/// A run of elements of one parameter, and where it lies in a fragment.
struct Piece {
  size_t parameter = 0;
  int64_t from = 0;
  int64_t size = 0;
  int64_t at = 0;
};

void for_each_piece(
    const std::vector<at::Tensor>& parameters, int64_t begin, int64_t end,
    c10::function_ref<void(const Piece&)> act) {
  int64_t first = 0;
  for (size_t i = 0; i < parameters.size() && first < end; ++i) {
    const int64_t last = first + parameters[i].numel();
    const int64_t from = std::max(first, begin);
    const int64_t to = std::min(last, end);
    if (from < to) act({i, from - first, to - from, from - begin});
    first = last;
  }
}

bool has_doubles(const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kDouble;
  });
}

}  // namespace

Fragments::Fragments(std::vector<at::Tensor> parameters, int64_t fragments)
    : parameters_(std::move(parameters)),
      count_(fragments),
      dtype_(has_doubles(parameters_) ? at::kDouble : at::kFloat) {
  for (const auto& parameter : parameters_) elements_ += parameter.numel();
}

at::Tensor Fragments::part_of(const at::Tensor& all, int64_t f) const {
  return all.narrow(0, begin(f), size(f));
}

at::Tensor Fragments::read(int64_t f) const {
  auto values = at::empty({size(f)}, at::dtype(dtype_).device(at::kCPU));
  for_each_piece(parameters_, begin(f), begin(f + 1), [&](const Piece& piece) {
    const auto flat = parameters_[piece.parameter].detach().reshape({-1});
    values.narrow(0, piece.at, piece.size).copy_(flat.narrow(0, piece.from, piece.size));
  });
  return values;
}

void Fragments::write(int64_t f, const at::Tensor& values, double keep) const {
  for_each_piece(parameters_, begin(f), begin(f + 1), [&](const Piece& piece) {
    const auto& parameter = parameters_[piece.parameter];
    auto flat = parameter.detach().reshape({-1});
    auto own = flat.narrow(0, piece.from, piece.size);
    const auto outer = values.narrow(0, piece.at, piece.size).to(parameter.device());
    if (keep == 0) {
      own.copy_(outer);
    } else {
      own.mul_(keep).add_(outer, 1 - keep);
    }
    // A parameter whose elements do not lie in order (channels last): reshape() made a copy.
    if (!parameter.is_contiguous()) parameter.copy_(flat.view(parameter.sizes()));
  });
}

}  // namespace ddp
