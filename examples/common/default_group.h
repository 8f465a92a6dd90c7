// Header only, so that benchmarks can use it without the examples.
#pragma once

#include <string>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>

#include "usage_error.h"

namespace examples {

/// Makes the default group for its lifetime: of the launched ranks, or of this process alone where
/// no launcher started it.
class DefaultGroup {
 public:
  /// \throws UsageError  the backend or the environment is invalid.
  explicit DefaultGroup(const std::string& backend) {
    try {
      ddp::init_process_group(ddp::ProcessGroupOptions().backend(backend));
    } catch (const c10::ValueError& error) {
      throw UsageError(error.what_without_backtrace());
    }
  }
  ~DefaultGroup() { ddp::destroy_process_group(); }
  DefaultGroup(const DefaultGroup&) = delete;
  DefaultGroup& operator=(const DefaultGroup&) = delete;
};

}  // namespace examples
