#include <ddp/internal/cut_registry.h>

#include <iterator>
#include <map>
#include <mutex>

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace ddp {
namespace {

struct CutRegistry {
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl>;

  std::mutex mutex;
  std::map<const void*, Parameter> parameters;
};

CutRegistry& cut_registry() {
  static auto* registry = new CutRegistry;  // some parameters outlive static variables
  return *registry;
}

}  // namespace

void note_cut(const std::vector<ParameterLayout>& cut) {
  auto& [mutex, parameters] = cut_registry();
  const std::lock_guard lock(mutex);
  for (auto at = parameters.begin(); at != parameters.end();) {
    at = at->second.expired() ? parameters.erase(at) : std::next(at);
  }
  for (const auto& layout : cut) {
    const auto& parameter = layout.local;
    parameters.insert_or_assign(
        parameter.unsafeGetTensorImpl(), CutRegistry::Parameter(parameter.getIntrusivePtr()));
  }
}

bool is_cut(const at::Tensor& parameter) {
  auto& [mutex, parameters] = cut_registry();
  const std::lock_guard lock(mutex);
  const auto found = parameters.find(parameter.unsafeGetTensorImpl());
  return found != parameters.end() && !found->second.expired();
}

}  // namespace ddp
