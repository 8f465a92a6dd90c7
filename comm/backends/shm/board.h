// What the ranks of a host write for each other to read: some kilobytes each, in one segment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ddp::backends::shm {

enum class Kind : uint32_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

/// Who moves the bytes of a collective.
enum class Carrier : uint32_t { kMemory, kGloo };

/// One collective, as one rank calls it. Two calls belong together when all but `offset` is equal.
struct Descriptor {
  Kind kind = Kind::kBarrier;
  Carrier carrier = Carrier::kMemory;
  int32_t dtype = 0;      // at::ScalarType
  int32_t reduction = 0;  // c10d::ReduceOp::RedOpType
  int32_t root = 0;       // of a broadcast
  uint64_t numel = 0;     // of the tensor that every rank holds a part of or all of
  uint64_t offset = 0;    // where this rank's lies in its segment, in bytes

  bool matches(const Descriptor& other) const {
    return kind == other.kind && carrier == other.carrier && dtype == other.dtype &&
           reduction == other.reduction && root == other.root && numel == other.numel;
  }
};

/// How many collectives a rank may be ahead of the slowest.
constexpr size_t kMostInFlight = 256;

/// Why a rank takes part no longer, for the others to repeat: cut to fit, and ended by a zero.
class Cause {
 public:
  void write(const std::string& text) {
    text.copy(text_.data(), text_.size() - 1);  // what is behind is zero from the start
  }
  std::string read() const { return text_.data(); }

 private:
  std::array<char, 512> text_{};
};

/// One rank's side; only that rank writes it.
struct alignas(64) RankBoard {
  /// How many collectives it has begun. Descriptor i is there once this is above i.
  std::atomic<uint64_t> begun{0};
  /// Of how many it has done its part, and no longer reads or writes others' memory.
  alignas(64) std::atomic<uint64_t> done{0};
  /// Set when it takes part no longer; and how many collectives had ended for it then. What comes
  /// after those it has given up, whatever it has done for it.
  alignas(64) std::atomic<uint32_t> left{0};
  std::atomic<uint64_t> left_at{0};
  Cause cause;  // written once, before `left`
  std::array<Descriptor, kMostInFlight> descriptors;
};

/// The segment: a RankBoard for each rank lies behind this.
struct alignas(64) Board {
  /// Changes whenever something is written while somebody sleeps: the word to sleep on.
  std::atomic<uint32_t> bell{0};
  std::atomic<uint32_t> sleepers{0};

  RankBoard& of(int rank) { return reinterpret_cast<RankBoard*>(this + 1)[rank]; }
  const RankBoard& of(int rank) const { return reinterpret_cast<const RankBoard*>(this + 1)[rank]; }
  static size_t bytes_for(int ranks) {
    return sizeof(Board) + static_cast<size_t>(ranks) * sizeof(RankBoard);
  }
};

// Other processes see the same words.
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace ddp::backends::shm
