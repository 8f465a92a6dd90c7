#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

#include "options.h"

namespace transformer {

/// Which ranks have parts of one model or of one window, and which have copies. Made of nothing, it
/// is that of a process that has all of both.
struct Groups {
  ddp::ProcessGroup tp;  // of the ranks that have a part of each layer each, or of this one
  ddp::ProcessGroup cp;  // of the ranks that have some positions of each window each
  // The ranks that have the same part of the layers average over it. Left out: the default group,
  // whichever it is at the time.
  ddp::GroupArg data;
  ddp::ProcessGroup pp;       // of the ranks that have some of the layers each; null: no pipeline
  ddp::ProcessGroup ends;     // of the first and the last rank of pp, on these
  ddp::ProcessGroup leaders;  // with --diloco one rank of each region; null on the others
  ddp::ProcessGroup totals;   // of the ranks whose tallies count each character once
  int64_t replicas = 1;       // how many models there are; each sees other windows
  int64_t replica = 0;        // which one this rank has, or has a part of
  int64_t stage = 0;          // this rank's place in the pipeline

  int64_t tp_size() const { return tp ? tp->getSize() : 1; }
  int64_t cp_size() const { return cp ? cp->getSize() : 1; }
  int64_t pp_size() const { return pp ? pp->getSize() : 1; }
  bool cuts() const { return tp_size() * cp_size() * pp_size() > 1; }

  /// This rank's positions of windows [N, T].
  at::Tensor own_positions(const at::Tensor& windows) const;
  /// The places of this rank's positions in windows of such a length, int64.
  at::Tensor places(int64_t length) const;
};

/// Those of a rank that has a whole model, one of so many.
Groups with_whole_models(int64_t replicas, int64_t replica);

/// Lays the ranks of the default group out in a mesh, by --pp, --dp, --cp and --tp, or in
/// --regions. Collective.
///
/// \throws UsageError  on every rank: the ranks cannot be divided like this.
Groups make_groups(const Options& options);

}  // namespace transformer
