#include "backends/registry.h"

#include <forward_list>
#include <mutex>
#include <utility>

#include <ddp/backend.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

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
  return find_if(registry.listed, [&](const auto* backend) { return backend->name == name; });
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
  result.runner = dynamic_cast<CollectiveRunner*>(result.backend.get());
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

namespace ddp {
namespace {

bool is_backend_name(const std::string& name) {
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_part = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_'; };
  return !name.empty() && is_letter(name.front()) && all_of(name, is_part);
}

BackendSetup public_setup(const backends::Setup& setup) {
  BackendSetup own;
  own.store = setup.store;
  own.rank = setup.rank;
  own.size = setup.world_size;
  own.timeout = setup.timeout;
  own.group_name = setup.group_name;
  own.global_ranks.assign(setup.global_ranks.begin(), setup.global_ranks.end());
  return own;
}

backends::RegisteredBackend entry_of(
    const std::string& name, const BackendDescription& description) {
  backends::RegisteredBackend entry;
  entry.name = name;
  for (const auto device : description.devices()) {
    entry.devices.push_back(c10::Device(device).str());
  }
  BackendCapabilities capabilities;
  capabilities.averages = description.averages();
  capabilities.waits_on_stream = description.waits_on_stream();
  capabilities.exchanges_lists = description.exchanges_lists();
  entry.capabilities = [capabilities] { return capabilities; };
  entry.make = [name, make = description.make()](const backends::Setup& setup) {
    auto backend = make(public_setup(setup));
    DDP_CHECK(
        backend, "backend ", name, ": expected make() to return a backend, got none on rank ",
        setup.rank, " of ", setup.world_size, ". Return one, or throw the reason.");
    return backend;
  };
  entry.is_own = true;
  entry.connects_late = true;
  entry.picks_device = description.picks_device();
  return entry;
}

}  // namespace

void register_backend(const std::string& name, const BackendDescription& description) {
  DDP_CHECK_VALUE(
      is_backend_name(name),
      "register_backend: expected lower-case letters, digits and _ in the name, a letter first, "
      "got \"",
      name, "\". Choose another.");
  DDP_CHECK_VALUE(
      !description.devices().empty(), "register_backend: expected devices(), got none for \"", name,
      "\". Name the types of devices whose tensors it carries.");
  DDP_CHECK_VALUE(
      description.make(), "register_backend: expected make(), got none for \"", name,
      "\". Give the function that makes the backend of a group.");
  DDP_CHECK_VALUE(
      backends::add(entry_of(name, description)),
      "register_backend: expected a name that is free, got \"", name, "\". Choose another.");
}

}  // namespace ddp
