#include <ddp/internal/prepared_load.h>

#include <algorithm>
#include <iterator>
#include <set>

#include <ddp/internal/text.h>

namespace ddp {

std::string quoted_names(const std::vector<std::string>& names) {
  constexpr size_t kMost = 10;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    text += ddp::str(i == 0 ? "" : ", ", '"', names[i], '"');
  }
  if (names.size() > kMost) text += ddp::str(" and ", names.size() - kMost, " more");
  return text;
}

std::vector<std::string> names_without(
    const std::vector<std::string>& all, const std::vector<std::string>& some) {
  const std::set<std::string> known(some.begin(), some.end());
  std::vector<std::string> rest;
  std::copy_if(all.begin(), all.end(), std::back_inserter(rest), [&](const std::string& name) {
    return known.count(name) == 0;
  });
  return rest;
}

std::string lacking_names(
    const std::string& own, const std::string& saved, const std::vector<std::string>& missing,
    const std::vector<std::string>& additional) {
  std::vector<std::string> texts;
  if (!missing.empty()) {
    texts.push_back(ddp::str(saved, " lacks ", own, "'s ", quoted_names(missing)));
  }
  if (!additional.empty()) {
    texts.push_back(ddp::str(own, " lacks ", saved, "'s ", quoted_names(additional)));
  }
  return joined_by("; ", texts);
}

const c10::IValue* find_in(const c10::IValue& dict, const c10::IValue& key) {
  if (!dict.isGenericDict()) return nullptr;
  const auto entries = dict.toGenericDict();
  const auto found = entries.find(key);
  return found == entries.end() ? nullptr : &found->value();
}

}  // namespace ddp
