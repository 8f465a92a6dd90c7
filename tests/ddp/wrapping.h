// What tests of the wrapper share.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <ddp/distributed_data_parallel.h>

#include "support/ranks.h"

namespace ddp::testing {

/// Options for a wrapper over a rank-thread's own group.
inline DistributedDataParallelOptions in(const Rank& self) {
  return DistributedDataParallelOptions().process_group(self.group);
}

/// What `f` throws, without a backtrace; "" for nothing.
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Far beyond the 5 s in which ranks have to learn of each other's errors: what tests of those see
/// is not this.
const RanksOptions kLongTimeout{std::chrono::seconds(50), std::chrono::seconds(55)};

}  // namespace ddp::testing
