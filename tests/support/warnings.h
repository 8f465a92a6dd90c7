// Collects the library's warnings, for tests whose subject they are.
#pragma once

#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace ddp::testing {

/// Collects the warnings of the constructing thread during its lifetime.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }

  /// Counts the warnings that contain `part`.
  int count(const std::string& part) const {
    int found = 0;
    for (const auto& text : texts) found += text.find(part) != std::string::npos;
    return found;
  }

  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

/// Makes TORCH_WARN_ONCE warn each time during its lifetime.
struct WarnAlways {
  WarnAlways() { c10::WarningUtils::set_warnAlways(true); }
  ~WarnAlways() { c10::WarningUtils::set_warnAlways(false); }
};

}  // namespace ddp::testing
