#pragma once

#include <memory>

#include <ddp/distributed_data_parallel.h>

#include "engine.h"

namespace ddp_bench {

/// LibTorch's own c10d::Reducer, in the sequence in which Python's wrapper drives it.
///
/// \param options  process_group, bucket_cap_mb, bucket_cap_mb_list and broadcast_buffers count;
///        the others stay as Python has them by default.
std::unique_ptr<Engine> make_c10d(Task task, const ddp::DistributedDataParallelOptions& options);

}  // namespace ddp_bench
