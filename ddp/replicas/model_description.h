// Descriptions that all ranks compare.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/reducer.h>

#include "wrapper/model_tensors.h"

namespace ddp {

/// One thing that all ranks have to agree on: a parameter, a buffer or an option.
struct DescribedItem {
  std::string kind;   // "parameter", "buffer", "option"; "error", without a name
  std::string name;   // without tabs or newlines
  std::string value;  // "[10, 32] float, strides [32, 1], ..."; without tabs or newlines
};

using Description = std::vector<DescribedItem>;

/// `text` with spaces for the tabs and newlines, which separate the fields of a DescribedItem.
std::string printable(std::string text);

/// The ranks whose description differs from rank 0's, in rising order.
std::vector<size_t> ranks_unlike_first(const std::vector<Description>& by_rank);

/// How the description `b` of rank `rank_b` first differs from `a`, rank 0's.
std::string describe_item_difference(const Description& a, const Description& b, size_t rank_b);

/// Gathers the ranks' descriptions if their hashes differ.
///
/// \param subject  what is compared, in the plural, for the text of a failure.
/// \param error  why this rank has no description; null: it has one. All ranks throw it.
/// \return the descriptions by rank; empty where all are the same.
/// \throws c10::ValueError  on every rank, where one has an error.
///
/// Collective: yes. Blocks: host.
/// Cost: two all-gathers of a few bytes; of whole descriptions only when they differ.
std::vector<Description> gather_if_hashes_differ(
    const char* subject, const Description& mine, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor);

/// Describes this rank's parameters, buffers and options, in the order in which it communicates.
///
/// \param trained  the parameters whose gradients are averaged.
Description describe_model(
    const std::vector<StateTensor>& state, const std::vector<NamedParameter>& trained,
    const DistributedDataParallelOptions& options, const ProcessGroup& group);

/// Throws on every rank, with the same text, where descriptions of models or of their options
/// differ: how the first rank that differs from rank 0 differs, and which others do.
///
/// \param by_rank  of gather_if_hashes_differ().
void check_are_same(const std::vector<Description>& by_rank);

}  // namespace ddp
