#pragma once

#include <exception>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// The same store over another connection; the store itself if it cannot be cloned.
inline c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

}  // namespace ddp
