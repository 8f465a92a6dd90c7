#include <ddp/internal/stage_tensors.h>

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace ddp {
namespace {

class StagePlaces {
 public:
  static StagePlaces& instance() {
    static auto* places = new StagePlaces;  // pipelines may end after static variables
    return *places;
  }

  void add(const at::Tensor& tensor, const StagePlace& place) {
    const std::lock_guard lock(mutex_);
    ++places_.try_emplace(key_of(tensor), Entry{place}).first->second.uses;
  }

  void remove(const at::Tensor& tensor) {
    StagePlace last;  // a group may end with it, outside of the lock
    const std::lock_guard lock(mutex_);
    const auto entry = places_.find(key_of(tensor));
    if (--entry->second.uses > 0) return;
    last = std::move(entry->second.place);
    places_.erase(entry);
  }

  std::optional<StagePlace> find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto entry = places_.find(key_of(tensor));
    return entry == places_.end() ? std::nullopt : std::optional(entry->second.place);
  }

 private:
  struct Entry {
    StagePlace place;
    int uses = 0;  // by StageTensors
  };

  static const void* key_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

  std::mutex mutex_;
  std::unordered_map<const void*, Entry> places_;
};

}  // namespace

StageTensors::~StageTensors() {
  for (const auto& tensor : tensors_) StagePlaces::instance().remove(tensor);
}

void StageTensors::add(const at::Tensor& tensor, const StagePlace& place) {
  tensors_.push_back(tensor);
  StagePlaces::instance().add(tensor, place);
}

void add_stage_to(ParameterLayout& layout) {
  if (layout.stage) return;
  const auto place = StagePlaces::instance().find(layout.local);
  if (!place) return;
  layout.stage = place->stage;
  layout.sharded_over.push_back(place->ranks);
  if (place->tied_over) layout.replicated_over.push_back(place->tied_over);
}

}  // namespace ddp
