#pragma once

#include <string>

#include <ddp/export.h>

namespace ddp {

/// Writes the collectives that this process called last, in each of its groups. For a job that
/// hangs or has failed: the ranks' files show where their calls differ.
///
/// The record has up to 256 calls of each group and device type: number, time, dtype, number of
/// elements, reduction, root; and why a group has failed. Calls of one number have to be the same
/// on all ranks of a group. send() and recv() are not in it.
///
/// With DDP_FLIGHT_RECORD=PREFIX in the environment each rank whose group fails writes
/// PREFIX.rankR.json, where R is its rank in the world.
///
/// \param path  a file; JSON if it ends with ".json", else text with a line for each call.
/// \throws c10::Error  if the file cannot be written.
///
/// Collective: no. Threads: any one. Cost: nothing until it is called; a call costs a collective
/// less than a tenth of a microsecond to keep.
/// Source: TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE of torch 2.11.0.
DDP_API void dump_flight_record(const std::string& path);

}  // namespace ddp
