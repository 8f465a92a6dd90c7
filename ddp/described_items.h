#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

namespace ddp {

/// One thing that all ranks have to agree on: a parameter, a buffer or an option.
struct DescribedItem {
  std::string kind;   // "parameter", "buffer", "option"; "refusal", which stands alone
  std::string name;   // without tabs or newlines
  std::string value;  // "[10, 32] float, strides [32, 1], ..."; the same
};

using Description = std::vector<DescribedItem>;

/// `text` as it may stand in a DescribedItem.
std::string printable(std::string text);

/// The ranks that describe something else than rank 0, in rising order.
std::vector<size_t> ranks_unlike_first(const std::vector<Description>& by_rank);

/// How the description `b` of rank `rank_b` first differs from `a`, rank 0's.
std::string describe_item_difference(const Description& a, const Description& b, size_t rank_b);

/// Exchanges the ranks' descriptions where they differ.
///
/// \param subject  what is compared, in the plural, for the text of a failure.
/// \param refusal  why this rank cannot describe anything; the others learn it. Empty: it can.
/// \return by rank; empty where all are the same.
/// \throws c10::ValueError  on every rank, where one refuses.
///
/// Collective: yes. Blocks: host.
/// Cost: two all-gathers of a few bytes; of whole descriptions only when they differ.
std::vector<Description> gather_where_different(
    const char* subject, const Description& mine, const std::exception_ptr& refusal,
    const ProcessGroup& group, GroupMonitor& monitor);

}  // namespace ddp
