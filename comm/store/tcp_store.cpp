#include "store/tcp_store.h"

#include <functional>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/name_lookups.h"
#include "base/socket_address.h"

namespace ddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

bool is_in_numbers(const std::string& host) { return ddp::parse_address(host, "9").length > 0; }

StorePtr make_store(
    const std::string& host, const std::function<StorePtr()>& make, int* looked_up) {
  if (!is_in_numbers(host)) return make();
  StorePtr store;
  const int count = without_name_lookups([&] { store = make(); });
  if (looked_up) *looked_up = count;
  return store;
}

}  // namespace

const c10d::TCPStore* tcp_store_of(c10d::Store& store) {
  auto* innermost = &store;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(innermost)) {
    innermost = prefixed->getUnderlyingStore().get();
  }
  return dynamic_cast<const c10d::TCPStore*>(innermost);
}

StorePtr open_tcp_store(
    const std::string& host, const c10d::TCPStoreOptions& options, int* looked_up) {
  return make_store(
      host, [&]() -> StorePtr { return c10::make_intrusive<c10d::TCPStore>(host, options); },
      looked_up);
}

StorePtr clone_store(c10d::Store& store, int* looked_up) {
  const auto* tcp = tcp_store_of(store);
  return make_store(
      tcp ? tcp->getHost() : "", [&] { return store.clone(); }, looked_up);
}

}  // namespace ddp
