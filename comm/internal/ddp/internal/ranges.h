// std's algorithms on a whole range.
#pragma once

#include <algorithm>
#include <iterator>
#include <numeric>
#include <vector>

namespace ddp {

template <typename Range, typename Predicate>
bool any_of(const Range& range, const Predicate& predicate) {
  return std::any_of(std::begin(range), std::end(range), predicate);
}

template <typename Range, typename Predicate>
bool all_of(const Range& range, const Predicate& predicate) {
  return std::all_of(std::begin(range), std::end(range), predicate);
}

template <typename Range, typename Predicate>
bool none_of(const Range& range, const Predicate& predicate) {
  return std::none_of(std::begin(range), std::end(range), predicate);
}

template <typename Range, typename Predicate>
auto count_if(const Range& range, const Predicate& predicate) {
  return std::count_if(std::begin(range), std::end(range), predicate);
}

template <typename Range, typename Predicate>
auto find_if(Range& range, const Predicate& predicate) {
  return std::find_if(std::begin(range), std::end(range), predicate);
}

template <typename Range, typename Value>
bool contains(const Range& range, const Value& value) {
  return std::find(std::begin(range), std::end(range), value) != std::end(range);
}

/// Removes the elements for which the predicate is true.
template <typename Container, typename Predicate>
void drop_if(Container& container, const Predicate& predicate) {
  container.erase(std::remove_if(container.begin(), container.end(), predicate), container.end());
}

/// 0 to size - 1.
inline std::vector<int> numbers_up_to(int size) {
  std::vector<int> numbers(static_cast<size_t>(size));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace ddp
