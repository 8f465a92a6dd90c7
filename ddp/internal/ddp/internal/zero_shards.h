// The state of a ZeroRedundancyOptimizer by ranks: what one of them has, and how others take it
// after the optimizer was cut anew.
#pragma once

#include <ATen/core/ivalue.h>
#include <ddp/zero.h>

namespace ddp {

/// This rank's state: a list of pieces, each a tuple of the parameter's number in the optimizer's
/// groups, the first element in the order of its memory, a list of the count of steps and the
/// state's other number, 0 where there is none, and a list of tensors, None where there is none.
/// The tensors may be the live ones.
c10::IValue own_shard(const ZeroRedundancyOptimizerBase& optimizer);

/// Takes from a shard, of any cut, the elements that this rank steps. What no shard has keeps the
/// state that it has: take from all of them after rebind().
///
/// Cost: a copy of what it takes.
void take_from_shard(ZeroRedundancyOptimizerBase& optimizer, const c10::IValue& shard);

}  // namespace ddp
