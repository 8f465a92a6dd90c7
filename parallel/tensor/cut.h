// How layers that are cut over a group get this rank's part of their parameters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

namespace ddp {

/// \throws c10::ValueError  unless `size` is a multiple of `parts`, which the text calls `divisor`.
void check_divides(
    const char* layer, const char* option, int64_t size, int64_t parts, const char* divisor,
    const c10d::ProcessGroup& group);

/// "[2, 3]", "an undefined one".
std::string sizes_text(const at::Tensor& t);

/// \throws c10::ValueError  unless `whole` has those sizes.
void check_whole(
    const char* layer, const char* name, const at::Tensor& whole, at::IntArrayRef sizes,
    const c10d::ProcessGroup& group);

/// \throws c10::ValueError  unless `whole` has that size, or is undefined without a bias.
void check_whole_bias(
    const char* layer, bool has_bias, const at::Tensor& whole, int64_t size,
    const c10d::ProcessGroup& group);

/// This rank's rows of `whole`: of each of `partitions` equal blocks of rows its part.
at::Tensor own_rows(const at::Tensor& whole, int64_t partitions, const c10d::ProcessGroup& group);
at::Tensor own_columns(const at::Tensor& whole, const c10d::ProcessGroup& group);

/// The layouts of own_rows(), of own_columns(), and of a parameter that all ranks of the group
/// have.
///
/// \param sizes  of the whole.
ParameterLayout layout_of_rows(
    std::string name, const at::Tensor& own, std::vector<int64_t> sizes, int64_t partitions,
    const ProcessGroup& group);
ParameterLayout layout_of_columns(
    std::string name, const at::Tensor& own, std::vector<int64_t> sizes, const ProcessGroup& group);
ParameterLayout layout_of_replica(
    std::string name, const at::Tensor& own, const ProcessGroup& group);

/// \throws c10::Error  on every rank, unless the ranks drew the same values for `whole`.
///
/// Under DeferredInit the ranks compare when they materialize.
///
/// Collective: yes. Blocks: host. Cost: a hash of the values, and an all-gather of a text.
void check_drawn_alike(const char* layer, const at::Tensor& whole, const ProcessGroup& group);

}  // namespace ddp
