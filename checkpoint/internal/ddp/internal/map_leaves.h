// Trees of values: tuples, lists and dictionaries, and what lies in them.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

namespace ddp {

/// A tree of the same form, whose leaves are `map(leaf)`. Keys of dictionaries stay. Lists and
/// dictionaries become such of any values.
template <typename Map>
c10::IValue map_leaves(const c10::IValue& value, const Map& map) {
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) {
      elements.push_back(map_leaves(element, map));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& element : value.toListRef()) list.push_back(map_leaves(element, map));
    return list;
  }
  if (value.isGenericDict()) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& entry : value.toGenericDict()) {
      dict.insert(entry.key(), map_leaves(entry.value(), map));
    }
    return dict;
  }
  return map(value);
}

}  // namespace ddp
