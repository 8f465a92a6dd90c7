// A backend whose other ranks need not exist.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "pretend/present_ranks.h"

namespace ddp {

/// This process's part in a pretended job, which its groups share.
struct PretendedJob {
  PretendedRank self;
  /// The store of the present ranks; null where this process is the only one.
  c10::intrusive_ptr<c10d::Store> store = {};
  /// Carries messages between the present ranks, by their place in the list; the same.
  backends::BackendPtr messages = {};
};

/// Connects the present ranks to each other over Gloo.
///
/// \param setup  the store, the limits and the devices are used.
/// \param address, port  where the lowest present rank listens.
std::shared_ptr<PretendedJob> connect_present_ranks(
    const PretendedRank& self, const backends::Setup& setup, const std::string& address, int port);

/// A backend of one group of a pretended job.
///
/// A group whose members are all present is over Gloo, as any other. Else collectives are over when
/// they return, and their results are as if every rank had this rank's tensors. A broadcast or
/// a scatter of another rank leaves the output as it is, or zero. Messages between present ranks
/// are real, those to other ranks are dropped, and one from another rank is an error.
///
/// \param setup  of the group. \param name  of the backend in whose place it is.
/// \param key  of the group; differs between the groups of a job.
backends::BackendPtr make_pretend_backend(
    const std::shared_ptr<PretendedJob>& job, const backends::Setup& setup, const std::string& name,
    const std::string& key);

}  // namespace ddp
