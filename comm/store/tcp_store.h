#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace ddp {

/// The innermost store below all prefixes, if it is a TCPStore; else null.
const c10d::TCPStore* tcp_store_of(c10d::Store& store);

/// Makes a TCPStore, which looks up no name where `host` is an address in numbers.
///
/// \param looked_up  if not null: set to the number of look-ups that c10d tried.
c10::intrusive_ptr<c10d::Store> open_tcp_store(
    const std::string& host, const c10d::TCPStoreOptions& options, int* looked_up = nullptr);

/// The same store over another connection, as Store::clone(); made as open_tcp_store() does.
c10::intrusive_ptr<c10d::Store> clone_store(c10d::Store& store, int* looked_up = nullptr);

}  // namespace ddp
