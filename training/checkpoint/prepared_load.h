#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace ddp {

/// A state that was read and fits; taking it over is a step of its own, for all ranks have to be
/// able to before any does.
struct PreparedLoad {
  std::function<void()> apply;
  /// Brings the state before `apply` back. Empty: `apply` cannot fail, and comes after all that
  /// can.
  std::function<void()> undo = nullptr;
  /// What strict(false) lets pass; "" for nothing.
  std::string notice = "";
};

/// "a", "b" and "c": at most ten in quotation marks, then how many more there are.
std::string quoted_names(const std::vector<std::string>& names);

/// The value of a dictionary's key; null for none.
const c10::IValue* find_in(const c10::IValue& dict, const c10::IValue& key);

}  // namespace ddp
