#pragma once

#include <map>
#include <string>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// Adds up `value` over the ranks of the group, in double: a loss, a count of samples.
///
/// Integers up to 2^53 are added exactly. The result has the same bits on every rank.
///
/// Collective: yes. Blocks: host. For values in a tensor on a GPU, all_reduce() needs no copy to
/// the host.
/// Cost: one all-reduce of 2 KiB, on the CPU if the group has a backend for it, else on its
/// current GPU.
/// \throws c10::Error  on every rank if another rank calls average() or passes a map instead.
DDP_API double sum(double value, const GroupArg& group = {});

/// Adds up each value of `values` over the ranks of the group: several metrics in one collective.
///
/// Example:
/// ```
/// auto totals = ddp::sum({{"loss", loss_sum}, {"correct", correct}, {"samples", samples}});
/// double accuracy = totals["correct"] / totals["samples"];
/// ```
/// \param values  with the same keys on every rank.
/// \return the keys of `values` with the sums.
/// \throws c10::Error  on every rank, with the same text, if keys differ: it names a key that some
///         ranks lack, and those ranks. The group stays usable.
///
/// Collective: yes. Blocks: host. Cost: as sum(double). Above 192 keys, a second all-reduce.
DDP_API std::map<std::string, double> sum(
    const std::map<std::string, double>& values, const GroupArg& group = {});

/// sum() divided by the world size: the mean over ranks.
///
/// If ranks have different numbers of samples, the mean over samples is a quotient of two sums.
DDP_API double average(double value, const GroupArg& group = {});
/// The keys of `values` with the means.
DDP_API std::map<std::string, double> average(
    const std::map<std::string, double>& values, const GroupArg& group = {});

}  // namespace ddp
