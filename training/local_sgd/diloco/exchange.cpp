#include "local_sgd/diloco/exchange.h"

#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>

#include "local_sgd/diloco/wire.h"

namespace ddp {
namespace {

// The mean in the order of regions, so that every rank has the same bits.
at::Tensor mean_of_rows(Wire wire, const at::Tensor& rows, int64_t elements) {
  auto sum = at::zeros({elements}, at::kFloat);
  for (int64_t region = 0; region < rows.size(0); ++region) {
    sum.add_(decode(wire, rows[region], elements));
  }
  return sum.div_(static_cast<double>(rows.size(0)));
}

}  // namespace

int64_t Exchange::part_elements(int64_t elements) const {
  return is_cut() ? (elements + regions_ - 1) / regions_ : elements;
}

at::Tensor Exchange::encode_own(const at::Tensor& values) const {
  if (!is_cut()) return encode(wire_, values).unsqueeze(0);
  const int64_t part = part_elements(values.numel());
  const auto padded = at::constant_pad_nd(values, {0, part * regions_ - values.numel()});
  std::vector<at::Tensor> parts;
  for (int64_t k = 0; k < regions_; ++k) {
    parts.push_back(encode(wire_, padded.narrow(0, k * part, part)));
  }
  return at::stack(parts);
}

at::Tensor Exchange::decode_own(const at::Tensor& own, int64_t elements) const {
  std::vector<at::Tensor> parts;
  for (int64_t k = 0; k < own.size(0); ++k) {
    parts.push_back(decode(wire_, own[k], part_elements(elements)));
  }
  return at::cat(parts).narrow(0, 0, elements);
}

at::Tensor Exchange::run(
    const at::Tensor& own, int64_t elements, const ProcessGroup& leaders) const {
  if (regions_ == 1) return decode_own(own, elements);
  auto of_all = at::empty({regions_, own.size(1)}, at::kByte);
  if (!is_cut()) {
    all_gather_into_tensor(of_all, own, leaders);
    return mean_of_rows(wire_, of_all, elements);
  }
  auto slices = at::empty_like(own);
  all_to_all_single(slices, own, {}, {}, leaders);
  const auto mean = mean_of_rows(wire_, slices, part_elements(elements));
  all_gather_into_tensor(of_all, encode(wire_, mean).unsqueeze(0), leaders);
  return decode_own(of_all, elements);
}

int64_t Exchange::bytes_sent(int64_t elements) const {
  const int64_t part = encoded_bytes(wire_, part_elements(elements));
  return (regions_ - 1) * part * (is_cut() ? 2 : 1);
}

}  // namespace ddp
