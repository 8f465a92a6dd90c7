#include "backends/registry.h"

#include <algorithm>
#include <forward_list>
#include <mutex>
#include <utility>

namespace ddp::backends {
namespace {

// One line per backend of the library, whose own file describes it.
#define DDP_BACKENDS(BACKEND) \
  BACKEND(gloo)               \
  BACKEND(shm)                \
  BACKEND(nccl)               \
  BACKEND(mpi)

}  // namespace

#define DDP_DECLARE(name) RegisteredBackend describe_##name();
DDP_BACKENDS(DDP_DECLARE)
#undef DDP_DECLARE

namespace {

struct Registry {
  std::mutex mutex;
  std::forward_list<RegisteredBackend> owned;  // never removed: others hold pointers
  std::vector<const RegisteredBackend*> listed;

  void list(RegisteredBackend backend) {
    owned.push_front(std::move(backend));
    listed.push_back(&owned.front());
  }
};

// Never destroyed: static objects of a program may use groups while it exits.
Registry& registry() {
  static auto* registry = [] {
    auto* made = new Registry;
#define DDP_DESCRIBE(name) made->list(describe_##name());
    DDP_BACKENDS(DDP_DESCRIBE)
#undef DDP_DESCRIBE
    return made;
  }();
  return *registry;
}

auto find_in(Registry& registry, const std::string& name) {
  return std::find_if(registry.listed.begin(), registry.listed.end(), [&](const auto* backend) {
    return backend->name == name;
  });
}

}  // namespace

std::vector<const RegisteredBackend*> all() {
  auto& registry = backends::registry();
  const std::lock_guard lock(registry.mutex);
  return registry.listed;
}

const RegisteredBackend* find(const std::string& name) {
  auto& registry = backends::registry();
  const std::lock_guard lock(registry.mutex);
  const auto found = find_in(registry, name);
  return found == registry.listed.end() ? nullptr : *found;
}

ServedBackend served(BackendPtr backend, const std::string& name) {
  ServedBackend result{std::move(backend)};
  result.description = find(name.empty() ? result.backend->getBackendName() : name);
  if (result.description) result.capabilities = result.description->capabilities();
  return result;
}

bool add(RegisteredBackend backend, bool replaces_missing) {
  auto& registry = backends::registry();
  const std::lock_guard lock(registry.mutex);
  const auto found = find_in(registry, backend.name);
  if (found == registry.listed.end()) {
    registry.list(std::move(backend));
    return true;
  }
  if (!replaces_missing || (*found)->make) return false;
  registry.owned.push_front(std::move(backend));
  *found = &registry.owned.front();
  return true;
}

}  // namespace ddp::backends
