#include <ddp/internal/cut_registry.h>

#include <iterator>
#include <map>
#include <mutex>

#include <c10/core/TensorImpl.h>
#include <c10/util/accumulate.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/cut_parameters.h>

namespace ddp {
namespace {

struct CutRegistry {
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl>;
  struct Entry {
    Parameter parameter;
    CutBy by;
  };

  std::mutex mutex;
  std::map<const void*, Entry> entries;
};

CutRegistry& cut_registry() {
  static auto* registry = new CutRegistry;  // some parameters outlive static variables
  return *registry;
}

// A pipeline's stages have other parameters, but whole ones.
bool has_part(const ParameterLayout& layout) {
  return layout.local.defined() && is_in_parts(layout) &&
         layout.local.numel() != c10::multiply_integers(layout.sizes);
}

}  // namespace

void note_cut(const std::vector<ParameterLayout>& parameters, CutBy by) {
  auto& [mutex, entries] = cut_registry();
  const std::lock_guard lock(mutex);
  for (const auto& layout : parameters) {
    if (by == CutBy::Layer && !has_part(layout)) continue;
    const auto& parameter = layout.local;
    const auto known = entries.find(parameter.unsafeGetTensorImpl());
    if (known != entries.end() && !known->second.parameter.expired() && known->second.by >= by) {
      continue;
    }
    for (auto at = entries.begin(); at != entries.end();) {
      at = at->second.parameter.expired() ? entries.erase(at) : std::next(at);
    }
    entries.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        CutRegistry::Entry{CutRegistry::Parameter(parameter.getIntrusivePtr()), by});
  }
}

CutBy cut_of(const at::Tensor& parameter) {
  auto& [mutex, entries] = cut_registry();
  const std::lock_guard lock(mutex);
  const auto found = entries.find(parameter.unsafeGetTensorImpl());
  const bool is_known = found != entries.end() && !found->second.parameter.expired();
  return is_known ? found->second.by : CutBy::Nothing;
}

}  // namespace ddp
