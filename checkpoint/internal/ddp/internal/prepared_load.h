#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace ddp {

/// A state that was read and fits. Applying it is a separate step, because no rank may change its
/// state before all ranks are able to.
struct PreparedLoad {
  std::function<void()> apply;
  /// Restores the state before `apply`. Empty: `apply` cannot fail, and is called after every
  /// `apply` that can.
  std::function<void()> undo = nullptr;
  /// The differences that strict(false) accepted; "" for none.
  std::string notice = "";
};

/// Joins names as "a", "b" and "c": at most ten in quotation marks, then how many more there are.
std::string quoted_names(const std::vector<std::string>& names);

/// Returns the value of a dictionary's key; null for none.
const c10::IValue* find_in(const c10::IValue& dict, const c10::IValue& key);

}  // namespace ddp
