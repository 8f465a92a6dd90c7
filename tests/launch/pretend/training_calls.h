// Lists of calls of a training program over a mesh, with and without a mistake in it.
#pragma once

#include <string>
#include <vector>

#include "launch/pretend/written_calls.h"

namespace ddp::testing {

/// A mistake of one rank, or of one stage.
enum class Mistake {
  None,
  SkipsSum,         // a layer's sum over tp
  SkipsLayer,       // a layer, forward and backward
  SwappedSplit,     // a layer is cut along the other dimension
  WrongAxis,        // gradients of a layer are summed over tp instead of dp
  OddBatch,         // the last batch of one rank is smaller
  OddMessages,      // the last batch is smaller on one stage only
  TieOnOneStage,    // the last stage does not sum the gradient of a tied weight
  TieGroupMissing,  // nor make the group for it
  OtherDtype,       // a bucket
  OtherRoot,        // of a broadcast
  ExtraBarrier,
  SwappedGroups,  // sums over dp and over all in the other order
  MissingWait,
  OtherKind,
  ExtraStep,
  FewerMicrobatches,  // of the first stage
  WrongStage,         // sends to another stage
  SwappedBuckets,
  SkipsBucket,
  OtherGroups,  // replicas are counted in another order
  BothSend,     // two stages send to each other before they receive
};

struct Training {
  int pp = 1, dp = 1, tp = 1;
  int layers = 2;  // of a stage
  int microbatches = 2;
  int steps = 3;
  bool tied = false;
  Mistake mistake = Mistake::None;
  int faulty = 0;  // the rank that makes it

  int size() const { return pp * dp * tp; }
};

/// The list of one rank.
WrittenCalls write_calls(const Training& training, int rank);

}  // namespace ddp::testing
