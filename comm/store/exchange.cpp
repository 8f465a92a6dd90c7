#include "store/exchange.h"

#include <optional>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

std::vector<std::string> read_all(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  if (store.hasExtendedApi()) {
    for (const auto& bytes : store.multiGet(keys)) values.emplace_back(bytes.begin(), bytes.end());
  } else {
    for (const auto& key : keys) values.push_back(store.get_to_str(key));
  }
  return values;
}

/// The length of each value before it: "1 a2 bc".
std::string joined(const std::vector<std::string>& values) {
  std::string text;
  for (const auto& value : values) text += ddp::str(value.size(), ' ', value);
  return text;
}

/// Nothing if the text is not joined() of that many values.
std::optional<std::vector<std::string>> split(const std::string& text, size_t count) {
  std::vector<std::string> values;
  InputText input(text);
  while (values.size() < count) {
    size_t bytes = 0;
    input >> bytes;
    if (!input || input.get() != ' ' || bytes > text.size()) return std::nullopt;
    std::string value(bytes, '\0');
    if (!input.read(value.data(), static_cast<std::streamsize>(bytes))) return std::nullopt;
    values.push_back(std::move(value));
  }
  const bool is_whole = input.peek() == InputText::traits_type::eof();
  return is_whole ? std::make_optional(std::move(values)) : std::nullopt;
}

}  // namespace

std::vector<std::string> exchange(
    c10d::Store& store, const std::vector<std::string>& keys, int rank, const std::string& own,
    std::chrono::milliseconds at_most) {
  const auto key_of_all = keys.front() + "/all";
  store.set(keys[static_cast<size_t>(rank)], own);
  if (rank == 0) {
    store.wait(keys, at_most);
    auto values = read_all(store, keys);
    store.set(key_of_all, joined(values));
    return values;
  }
  store.wait({key_of_all}, at_most);
  const auto text = store.get_to_str(key_of_all);
  auto values = split(text, keys.size());
  DDP_CHECK(
      values, "process group: expected the values of ", keys.size(), " ranks in the store's entry ",
      key_of_all, ", got \"", text.substr(0, 80), "\" on rank ", rank,
      ". Use a store, or a prefix of one, to which nothing else writes.");
  return *std::move(values);
}

}  // namespace ddp
