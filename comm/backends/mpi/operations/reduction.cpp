#include "backends/mpi/operations/operation.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "backends/mpi/channel.h"
#include "backends/shm/backend/reduce.h"

namespace ddp::backends::mpi {
namespace {

// A piece is received, added and sent on while others are under way. All pieces that arrive at once
// take at most kMostScratch: with many ranks they are smaller.
constexpr size_t kPiece = size_t{512} << 10;
constexpr size_t kLeastPiece = size_t{16} << 10;
constexpr size_t kMostScratch = size_t{32} << 20;
constexpr size_t kWindow = 4;  // pieces that arrive at once
// Messages of one kind to or from one rank that are posted at once. Many, so that a rank goes on
// for long while another one does not run; not all, for MPI may keep the beginning of each.
constexpr size_t kMostPosted = 64;

// Up to this size in bytes, of all ranks together, everybody sends all to everybody.
constexpr size_t kMostDirect = size_t{512} << 10;
constexpr size_t kMostDirectOfRank = size_t{8} << 10;

/// Memory for messages that arrive. It is kept for the next collective: fresh memory costs a page
/// fault for each 4 KiB.
///
/// Threads: the MPI thread.
class ScratchPool {
 public:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t bytes = 0;
  };

  /// Never destroyed, as the MPI thread.
  static ScratchPool& instance() {
    static auto* instance = new ScratchPool;
    return *instance;
  }

  Block take(size_t bytes) {
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      if (block->bytes < bytes || (best != free_.end() && best->bytes <= block->bytes)) continue;
      best = block;
    }
    if (best == free_.end()) return {std::unique_ptr<std::byte[]>(new std::byte[bytes]), bytes};
    auto block = std::move(*best);
    free_.erase(best);
    kept_ -= block.bytes;
    return block;
  }
  void give_back(Block block) {
    if (block.bytes == 0 || kept_ + block.bytes > kMostKept) return;
    kept_ += block.bytes;
    free_.push_back(std::move(block));
  }

 private:
  static constexpr size_t kMostKept = size_t{64} << 20;

  std::vector<Block> free_;
  size_t kept_ = 0;  // bytes in free_
};

/// Adds the parts of all ranks, in their order. `received` has those of the others.
void add_up(
    const ReductionPlan& plan, const Channel& channel, const std::byte* own,
    const std::byte* received, size_t bytes, std::byte* sums) {
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < channel.size; ++rank) {
    if (rank == channel.rank) {
      sources.push_back(own);
    } else {
      sources.push_back(received);
      received += bytes;
    }
  }
  const auto elements = bytes / c10::elementSize(plan.dtype);
  shm::reduce_elements(plan.dtype, plan.op, sources, {sums}, 0, elements);
}

/// An all-reduce of a few bytes: one message a pair, and each rank adds all.
class DirectReduction : public Operation {
 public:
  DirectReduction(ReductionPlan plan, Tags tags) : plan_(std::move(plan)), tags_(tags) {}

  bool advance() override {
    has_moved_ = !transfers_;
    if (!transfers_) post();
    if (!transfers_->are_over()) return false;
    if (bytes_ > 0)
      add_up(plan_, *channel, plan_.input, scratch_.data.get(), bytes_, plan_.results);
    ScratchPool::instance().give_back(std::move(scratch_));
    if (plan_.finish) plan_.finish();
    return true;
  }

 private:
  void post() {
    transfers_.emplace(channel->collectives);
    bytes_ = plan_.begins.back() * c10::elementSize(plan_.dtype);
    scratch_ = ScratchPool::instance().take(
        std::max<size_t>(bytes_ * static_cast<size_t>(channel->size - 1), 1));
    auto* place = scratch_.data.get();
    for (int rank = 0; rank < channel->size; ++rank) {
      if (rank == channel->rank) continue;
      transfers_->receive(place, bytes_, rank, tags_.data);
      place += bytes_;
    }
    for (int rank = 0; rank < channel->size; ++rank) {
      if (rank != channel->rank) transfers_->send(plan_.input, bytes_, rank, tags_.data);
    }
  }

  ReductionPlan plan_;
  const Tags tags_;
  size_t bytes_ = 0;
  ScratchPool::Block scratch_;
  std::optional<Transfers> transfers_;
};

/// Each rank adds its share, in pieces, and sends the sums on at once.
///
/// Pieces complete in any order, but messages of one tag match in the order in which they are
/// posted. So parts, sums and results are each posted in the order of the pieces.
class PiecedReduction : public Operation {
 public:
  PiecedReduction(ReductionPlan plan, Tags tags) : plan_(std::move(plan)), tags_(tags) {}

  bool advance() override {
    has_moved_ = false;
    if (peers_.empty()) begin();
    add_arrived();
    bool is_over = added_ == pieces_;
    for (auto& peer : peers_) is_over = advance(peer) && is_over;
    if (!is_over || !sums_sent_->are_over()) return false;
    ScratchPool::instance().give_back(std::move(scratch_));
    if (plan_.finish) plan_.finish();
    return true;
  }

 private:
  /// Another rank: this rank's parts of its share, which leave, and its sums, which arrive.
  struct Peer {
    int rank;
    size_t pieces;
    size_t posted = 0;   // parts
    size_t left = 0;     // parts
    size_t awaited = 0;  // sums whose receive is posted
    size_t arrived = 0;  // sums
    std::deque<Transfers> parts = {};
    std::deque<Transfers> sums = {};
  };

  void begin() {
    has_moved_ = true;
    const auto others = static_cast<size_t>(channel->size - 1);
    element_ = c10::elementSize(plan_.dtype);
    const auto bytes = std::clamp(kMostScratch / (kWindow * others), kLeastPiece, kPiece);
    piece_ = bytes / element_ * element_;
    for (int rank = 0; rank < channel->size; ++rank) {
      if (rank != channel->rank) peers_.push_back({rank, pieces_of(rank)});
    }
    pieces_ = pieces_of(channel->rank);
    sums_sent_.emplace(channel->collectives);
    const auto largest = std::min(piece_, bytes_of(channel->rank));
    scratch_ = ScratchPool::instance().take(
        std::max<size_t>(std::min(kWindow, pieces_) * others * largest, 1));
  }

  size_t bytes_of(int rank) const {
    const auto r = static_cast<size_t>(rank);
    return (plan_.begins[r + 1] - plan_.begins[r]) * element_;
  }
  size_t pieces_of(int rank) const { return (bytes_of(rank) + piece_ - 1) / piece_; }
  size_t size_of(int rank, size_t piece) const {
    return std::min(piece_, bytes_of(rank) - piece * piece_);
  }
  /// Where a piece of a rank's share lies in a whole tensor.
  size_t offset_of(int rank, size_t piece) const {
    return plan_.begins[static_cast<size_t>(rank)] * element_ + piece * piece_;
  }
  std::byte* slot_of(size_t piece) const {
    const auto largest = std::min(piece_, bytes_of(channel->rank));
    return scratch_.data.get() + piece % kWindow * (peers_.size() * largest);
  }

  /// Receives the others' parts of this rank's share, adds them, and sends the sums.
  void add_arrived() {
    const int own = channel->rank;
    while (true) {
      while (posted_ < pieces_ && arriving_.size() < kWindow) {
        auto* place = slot_of(posted_);
        auto& parts = arriving_.emplace_back(channel->collectives);
        for (const auto& peer : peers_) {
          parts.receive(place, size_of(own, posted_), peer.rank, tags_.data);
          place += size_of(own, posted_);
        }
        ++posted_;
      }
      if (arriving_.empty() || !arriving_.front().are_over()) return;
      const auto bytes = size_of(own, added_);
      auto* sums = plan_.sums + added_ * piece_;
      add_up(plan_, *channel, plan_.input + offset_of(own, added_), slot_of(added_), bytes, sums);
      arriving_.pop_front();
      ++added_;
      has_moved_ = true;
      if (plan_.results == nullptr) continue;
      for (const auto& peer : peers_) sums_sent_->send(sums, bytes, peer.rank, tags_.results);
    }
  }

  /// \return  whether all has left and arrived.
  bool advance(Peer& peer) {
    while (!peer.parts.empty() && peer.parts.front().are_over()) {
      peer.parts.pop_front();
      ++peer.left;
      has_moved_ = true;
    }
    while (peer.posted < peer.pieces && peer.parts.size() < kMostPosted) {
      peer.parts.emplace_back(channel->collectives)
          .send(
              plan_.input + offset_of(peer.rank, peer.posted), size_of(peer.rank, peer.posted),
              peer.rank, tags_.data);
      ++peer.posted;
    }
    if (plan_.results == nullptr) return peer.left == peer.pieces;
    while (!peer.sums.empty() && peer.sums.front().are_over()) {
      peer.sums.pop_front();
      ++peer.arrived;
      has_moved_ = true;
    }
    // A sum arrives where this rank's part lay, once that has left.
    while (peer.awaited < peer.left && peer.sums.size() < kMostPosted) {
      peer.sums.emplace_back(channel->collectives)
          .receive(
              plan_.results + offset_of(peer.rank, peer.awaited), size_of(peer.rank, peer.awaited),
              peer.rank, tags_.results);
      ++peer.awaited;
    }
    return peer.arrived == peer.pieces;
  }

  ReductionPlan plan_;
  const Tags tags_;
  size_t element_ = 1;  // bytes, as all sizes here
  size_t piece_ = 0;
  std::vector<Peer> peers_;
  // This rank's own share:
  size_t pieces_ = 0;
  size_t posted_ = 0;  // whose receives are posted
  size_t added_ = 0;
  std::deque<Transfers> arriving_;  // one for each piece
  std::optional<Transfers> sums_sent_;
  ScratchPool::Block scratch_;
};

}  // namespace

OperationPtr make_reduction(ReductionPlan plan, Tags tags) {
  const auto bytes = plan.begins.back() * c10::elementSize(plan.dtype);
  const auto ranks = plan.begins.size() - 1;
  const bool is_direct =
      plan.results != nullptr && bytes <= kMostDirectOfRank && bytes * ranks <= kMostDirect;
  if (is_direct) return std::make_unique<DirectReduction>(std::move(plan), tags);
  return std::make_unique<PiecedReduction>(std::move(plan), tags);
}

}  // namespace ddp::backends::mpi
