#include "tensor/cut.h"

#include <utility>

#include <ATen/ATen.h>
#include <ddp/deferred_init.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

#include "deferred/recorder.h"

namespace ddp {

namespace {

void compare_drawn(
    const char* layer, const std::string& hash, const std::vector<int64_t>& sizes,
    const ProcessGroup& group) {
  agree(hash, group, layer, [&](const std::vector<std::string>& by_rank) -> std::string {
    const auto rank = first_different_rank(by_rank);
    if (rank == 0) return "";
    return ddp::str(
        layer, ": expected the same random numbers on all ranks of the group, but rank ", rank,
        " of ", by_rank.size(), " drew other values for [", joined_by(", ", sizes),
        "] than rank 0. Call torch::manual_seed() with one seed on all of them before.");
  });
}

}  // namespace

void check_divides(
    const char* layer, const char* option, int64_t size, int64_t parts, const char* divisor,
    const c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      size > 0 && size % parts == 0, layer, ": expected ", option, " to be a multiple of ", divisor,
      " = ", parts, ", got ", size, " ", on_rank_text(group),
      ". Pad the layer, or use fewer ranks.");
}

std::string sizes_text(const at::Tensor& t) {
  return t.defined() ? ddp::str(t.sizes()) : "an undefined one";
}

void check_whole(
    const char* layer, const char* name, const at::Tensor& whole, at::IntArrayRef sizes,
    const c10d::ProcessGroup& group) {
  const auto got = whole.defined() ? whole.sizes() : at::IntArrayRef();
  DDP_CHECK_VALUE(
      whole.defined() && got == sizes, layer, ": expected a whole ", name, " of sizes ", sizes,
      ", got ", got, " ", on_rank_text(group), ". Give the values of the layer before it is cut.");
}

void check_whole_bias(
    const char* layer, bool has_bias, const at::Tensor& whole, int64_t size,
    const c10d::ProcessGroup& group) {
  if (has_bias) return check_whole(layer, "bias", whole, size, group);
  DDP_CHECK_VALUE(
      !whole.defined(), layer, ": expected no bias with bias(false), got one of sizes ",
      sizes_text(whole), " ", on_rank_text(group), ". Leave it out, or set bias(true).");
}

at::Tensor own_rows(const at::Tensor& whole, int64_t partitions, const c10d::ProcessGroup& group) {
  const auto parts = whole.unflatten(0, {partitions, group.getSize(), -1});
  return parts.select(1, group.getRank()).flatten(0, 1).clone(at::MemoryFormat::Contiguous);
}

at::Tensor own_columns(const at::Tensor& whole, const c10d::ProcessGroup& group) {
  const int64_t columns = whole.size(1) / group.getSize();
  return whole.narrow(1, group.getRank() * columns, columns).clone(at::MemoryFormat::Contiguous);
}

ParameterLayout layout_of_rows(
    std::string name, const at::Tensor& own, std::vector<int64_t> sizes, int64_t partitions,
    const ProcessGroup& group) {
  auto layout = whole_layout(std::move(name), own);
  layout.boxes.clear();
  const auto rows = own.size(0) / partitions;
  for (int64_t p = 0; p < partitions; ++p) {
    TensorBox box{std::vector<int64_t>(sizes.size(), 0), own.sizes().vec()};
    box.offset[0] = (p * group->getSize() + group->getRank()) * rows;
    box.size[0] = rows;
    layout.boxes.push_back(std::move(box));
  }
  layout.sizes = std::move(sizes);
  layout.sharded_over = {group};
  return layout;
}

ParameterLayout layout_of_columns(
    std::string name, const at::Tensor& own, std::vector<int64_t> sizes,
    const ProcessGroup& group) {
  auto layout = whole_layout(std::move(name), own);
  layout.boxes[0].offset[1] = group->getRank() * own.size(1);
  layout.sizes = std::move(sizes);
  layout.sharded_over = {group};
  return layout;
}

ParameterLayout layout_of_replica(
    std::string name, const at::Tensor& own, const ProcessGroup& group) {
  auto layout = whole_layout(std::move(name), own);
  layout.replicated_over = {group};
  return layout;
}

void check_drawn_alike(const char* layer, const at::Tensor& whole, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  const auto hash_of = [](const at::Tensor& tensor) {
    const auto bytes = tensor.detach().contiguous().cpu();
    return std::to_string(hash_of_bytes(bytes.const_data_ptr(), bytes.nbytes()));
  };
  if (!is_deferred(whole)) return compare_drawn(layer, hash_of(whole), whole.sizes().vec(), group);
  check_when_materialized(whole, [=](const at::Tensor& values) {
    return [=, hash = hash_of(values), sizes = values.sizes().vec()] {
      compare_drawn(layer, hash, sizes, group);
    };
  });
}

}  // namespace ddp
