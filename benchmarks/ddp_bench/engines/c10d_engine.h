#pragma once

#include <memory>

#include <ddp/distributed_data_parallel.h>

#include "engine.h"

namespace ddp_bench {

/// LibTorch's own c10d::Reducer, called in the same sequence as by Python's wrapper.
///
/// \param options  uses process_group, bucket_cap_mb, bucket_cap_mb_list and broadcast_buffers; the
///        others have Python's defaults.
std::unique_ptr<Engine> make_c10d(Task task, const ddp::DistributedDataParallelOptions& options);

}  // namespace ddp_bench
