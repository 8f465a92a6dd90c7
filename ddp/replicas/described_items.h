#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

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

}  // namespace ddp
