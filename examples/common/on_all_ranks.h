#pragma once

#include <exception>
#include <functional>

#include <ddp/process_group.h>

namespace examples {

/// Thrown on ranks that stop because another rank failed, which reports the reason.
struct FailedElsewhere : std::exception {
  const char* what() const noexcept override { return "another rank failed"; }
};

/// Runs a step that may fail on some ranks only (files, devices), so that all stop if one does.
///
/// \throws  the exception of `step` on the first rank that failed; `FailedElsewhere` on the others.
///
/// Collective: yes; `step` must not be.
void on_all_ranks(const std::function<void()>& step, const ddp::GroupArg& group = {});

}  // namespace examples
