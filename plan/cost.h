// The costs of a layout on a cluster: memory, messages, and the time of a step.
#pragma once

#include <cstdint>

#include "plan/layout.h"
#include "plan/model.h"

namespace ddp::plan {

/// A message of n bytes takes latency + n / rate.
struct Link {
  double latency = 0;  // seconds
  double rate = 1;     // bytes a second
};

/// The ranks, as many on each host, and what they have.
struct Cluster {
  int64_t ranks = 1;
  int64_t hosts = 1;
  double memory = 0;      // bytes a rank
  double operations = 1;  // floating-point operations a second of a rank that has a core, or a GPU
  double cores = 0;       // a host's; 0: as many as ranks. Ranks share fewer, and compute by turns.
  double overlap = 1;     // the part of a collective that takes nothing from computing beside it
  Link host;              // between two ranks of a host
  Link network;           // between two hosts: all that their ranks send each other goes there

  int64_t ranks_a_host() const { return ranks / hosts; }
  /// How many times as long computing takes while all ranks compute.
  double crowding() const {
    const auto each = static_cast<double>(ranks_a_host());
    return cores > 0 && cores < each ? each / cores : 1;
  }
};

/// Bytes of the rank of a layout that needs most.
struct Memory {
  double state = 0;        // parameters, gradients and AdamW's two numbers
  double whole = 0;        // what fsdp gathers, and gradients before they are cut
  double activations = 0;  // of the micro-batches under way, and the logits
  double beside = 0;       // buckets and other tensors of a run

  double total() const { return state + whole + activations + beside; }
};

/// Bytes of one rank of the pipeline.
Memory memory_of_rank(const Model&, const Layout&, int64_t batch, int64_t rank);

/// \param batch  samples of a step, of all replicas.
Memory memory_of(const Model&, const Layout&, int64_t batch);

/// Bytes that a rank of the pipeline gives to collectives in a step, each direction of a ring
/// counted: an all-reduce has two, a gather or a reduce-scatter one, of the whole tensor.
struct DirectionBytes {
  double tensor = 0;  // sums over tp
  double data = 0;    // over dp
};
DirectionBytes directions_of_step(const Model&, const Layout&, int64_t batch, int64_t rank);

/// Where the ranks of an axis lie: neighbors share tp, then dp, then pp.
enum class Axis { Tp, Dp, Pp };

/// Seconds of an all-reduce over an axis, while all groups of the axis do the same. A ring within a
/// host; over several, the hosts' sums go through the network, of all groups that a host has ranks
/// of.
double all_reduce_time(const Cluster&, const Layout&, Axis axis, double bytes);
/// Seconds of an all-gather to so many bytes, or of a reduce-scatter of them: half an all-reduce.
double gather_time(const Cluster&, const Layout&, Axis axis, double bytes);
/// Seconds of a message from a stage to the next one, while all ranks of the stage send one.
double message_time(const Cluster&, const Layout&, double bytes);

bool crosses_hosts(const Cluster&, const Layout&, Axis axis);

/// Seconds of a step of the rank that has most to do.
struct StepTime {
  double compute = 0;  // of a rank with a core of its own, in forward and backward
  double tensor = 0;   // sums over tp, for which all of its ranks wait
  double idle = 0;     // waits for other stages, and for cores that other ranks have
  double data = 0;     // gradients and gathers over dp that computing does not hide
  double update = 0;   // AdamW and clipping
  double total() const { return compute + tensor + idle + data + update; }
};

/// Predicts a step of so many samples, of all replicas.
///
/// Cost: that of a simulation of the pipeline, O(pp * chunks * microbatches).
StepTime step_time(const Model&, const Cluster&, const Layout&, int64_t batch);

}  // namespace ddp::plan
