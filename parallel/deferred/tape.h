// The calls under DeferredInit guards, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>

#include "deferred/deferred_storage.h"

namespace ddp {

/// Looks at a tensor's values when they are known, and returns what to do when no lock is held.
using ValueCheck = std::function<std::function<void()>(const at::Tensor&)>;

/// One storage. Records name it by a stand-in: a storage on the meta device, so that a record keeps
/// no deferred tensor alive, and what an operation would return can be asked of its meta kernel.
struct Slot {
  c10::Storage standin;
  c10::Device device;
  c10::weak_intrusive_ptr<c10::StorageImpl> user;  // expired: no tensor has it any more
  c10::Storage initial = {};                       // the values before the first record, if any
  bool materialized = false;
};

/// A tensor of no tape, which has to be as it was when the operation is repeated.
struct OrdinaryInput {
  at::Tensor tensor;
  int64_t version;
};

/// One operation. Tensors of slots are stand-ins.
struct Record {
  std::optional<c10::OperatorHandle> op;  // none: a check, or nothing any more
  torch::jit::Stack arguments;
  std::vector<size_t> reads;        // slots among the arguments, those that it writes included
  std::vector<size_t> writes;       // slots that it changes or makes
  std::vector<at::Tensor> results;  // that it makes, in order; undefined: views of arguments
  std::vector<OrdinaryInput> ordinary;
  ValueCheck check;

  std::optional<size_t> stream;  // of random numbers
  at::Tensor state;              // the generator's before it; undefined: after the record before
  bool drawn = false;            // whether the state after it is known

  bool needs_only_itself() const;
};

/// The numbers of one generator. The guard draws none that count: records continue one another,
/// unless the generator was found in another state than the one it had before.
struct RandomStream {
  at::Generator generator;
  at::Tensor last_seen;  // the state when a record or a replay last looked
  at::Tensor reached;    // the state after the last record that has been drawn
};

/// The records of one thread, as long as one of their tensors is deferred.
///
/// Threads: all but `mutex` is guarded by it. Owners are the guard and the deferred storages.
class Tape {
 public:
  std::mutex mutex;
  std::vector<Slot> slots;
  std::vector<Record> records;
  std::vector<RandomStream> streams;

  /// A new slot without a storage.
  size_t add_slot(size_t nbytes, c10::Device device);
  /// The slot of a stand-in, or none for other tensors.
  std::optional<size_t> slot_of(const at::Tensor& standin) const;
  at::Tensor standin_of(const at::Tensor& tensor, size_t slot) const;
  size_t stream_of(const at::Generator& generator);
  /// Forgets the records that nothing will need.
  void forget_what_is_done();

 private:
  bool is_finished(size_t slot) const;

  std::unordered_map<const c10::StorageImpl*, size_t> slot_of_standin_;
};

/// Held by who puts another state into a default generator, or looks at its state.
std::mutex& generator_mutex();

/// The generator's state: a copy.
at::Tensor state_of(const at::Generator& generator);
void set_state(at::Generator generator, const at::Tensor& state);
/// Moves a generator of the CPU on, so that a program that gives it the same state again is
/// noticed. One that another thread moved on stays: ranks that are threads share it, and draw the
/// same.
///
/// \return the state to draw from: `state`, or what it was before another thread moved it on.
at::Tensor mark_state(const at::Generator& generator, const at::Tensor& state);
bool same_state(const at::Tensor& one, const at::Tensor& other);

/// Gives the slots' storages memory and their values.
///
/// \return  what to call when the tape's mutex, which the caller has, is free.
std::vector<std::function<void()>> replay(Tape& tape, const std::vector<size_t>& slots);

}  // namespace ddp
