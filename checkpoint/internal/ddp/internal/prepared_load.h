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

/// Returns the names of `all` that are not in `some`, in order.
std::vector<std::string> names_without(
    const std::vector<std::string>& all, const std::vector<std::string>& some);

/// Writes "the file lacks the model's "a"; the model lacks the file's "b"" of `own` "the model" and
/// `saved` "the file"; "" where no name is missing or additional.
std::string lacking_names(
    const std::string& own, const std::string& saved, const std::vector<std::string>& missing,
    const std::vector<std::string>& additional);

/// Returns the value of a dictionary's key; null for none, and in what is no dictionary.
const c10::IValue* find_in(const c10::IValue& dict, const c10::IValue& key);

}  // namespace ddp
