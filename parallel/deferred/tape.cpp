#include "deferred/tape.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace ddp {

bool Record::needs_only_itself() const {
  return ordinary.empty() && std::all_of(reads.begin(), reads.end(), [&](size_t slot) {
           return std::find(writes.begin(), writes.end(), slot) != writes.end();
         });
}

size_t Tape::add_slot(size_t nbytes, c10::Device device) {
  c10::Storage standin(
      c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, at::kMeta),
      c10::GetAllocator(at::kMeta), /*resizable=*/true);
  slot_of_standin_[standin.unsafeGetStorageImpl()] = slots.size();
  slots.push_back(
      {std::move(standin), device,
       c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>())});
  return slots.size() - 1;
}

std::optional<size_t> Tape::slot_of(const at::Tensor& standin) const {
  if (!standin.defined() || !standin.is_meta()) return {};
  const auto found = slot_of_standin_.find(standin.storage().unsafeGetStorageImpl());
  if (found == slot_of_standin_.end()) return {};
  return found->second;
}

at::Tensor Tape::standin_of(const at::Tensor& tensor, size_t slot) const {
  return tensor_over(slots[slot].standin, tensor);
}

size_t Tape::stream_of(const at::Generator& generator) {
  const auto found = std::find_if(streams.begin(), streams.end(), [&](const RandomStream& stream) {
    return stream.generator == generator;
  });
  if (found != streams.end()) return static_cast<size_t>(found - streams.begin());
  streams.push_back({generator, {}, {}});
  return streams.size() - 1;
}

bool Tape::is_finished(size_t slot) const {
  return slots[slot].materialized || slots[slot].user.expired();
}

void Tape::forget_what_is_done() {
  std::unordered_set<size_t> still_read;
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    const auto& touched = record->op ? record->writes : record->reads;
    const bool needed = (record->stream && !record->drawn) ||
                        std::any_of(touched.begin(), touched.end(), [&](size_t slot) {
                          return !is_finished(slot) || still_read.count(slot) == 1;
                        });
    if (needed) {
      still_read.insert(record->reads.begin(), record->reads.end());
    } else {
      *record = Record{};
    }
  }
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    if (is_finished(slot) && still_read.count(slot) == 0) slots[slot].initial = {};
  }
}

std::mutex& generator_mutex() {
  static std::mutex mutex;
  return mutex;
}

at::Tensor state_of(const at::Generator& generator) {
  auto shared = generator;
  const std::lock_guard lock(shared.mutex());
  return shared.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor mark_state(const at::Generator& generator, const at::Tensor& state) {
  if (generator.device().type() != at::kCPU) return state;
  static std::mutex mutex;
  static at::Tensor before, after;  // of the last generator that was moved on
  const std::lock_guard lock(mutex);
  if (same_state(state, after)) return before;
  auto shared = generator;
  {
    const std::lock_guard of_generator(shared.mutex());
    at::check_generator<at::CPUGeneratorImpl>(shared)->random();
  }
  before = state;
  after = state_of(generator);
  return before;
}

bool same_state(const at::Tensor& one, const at::Tensor& other) {
  return one.defined() && other.defined() && one.nbytes() == other.nbytes() &&
         std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

}  // namespace ddp
