#include "backends/mpi/operations/operation.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "backends/mpi/channel.h"

namespace ddp::backends::mpi {
namespace {

class Exchange : public Operation {
 public:
  Exchange(ExchangePlan plan, Tags tags) : plan_(std::move(plan)), tags_(tags) {}

  bool advance() override {
    has_moved_ = !transfers_;
    if (!transfers_) post();
    if (!transfers_->are_over()) return false;
    if (plan_.finish) plan_.finish();
    return true;
  }

 private:
  void post() {
    transfers_.emplace(channel->collectives);
    for (const auto& part : plan_.received) {
      transfers_->receive(part.data, part.bytes, part.from, tags_.data);
    }
    for (const auto& part : plan_.sent) {
      transfers_->send(part.data, part.bytes, part.to, tags_.data);
    }
  }

  ExchangePlan plan_;
  const Tags tags_;
  std::optional<Transfers> transfers_;
};

constexpr size_t kBroadcastPiece = size_t{512} << 10;
constexpr size_t kMostReceives = 4;  // posted at once

class Broadcast : public Operation {
 public:
  Broadcast(BroadcastPlan plan, Tags tags) : plan_(std::move(plan)), tags_(tags) {}

  bool advance() override {
    has_moved_ = false;
    if (!sends_) begin();
    while (posted_ < pieces_ && receives_.size() < kMostReceives) {
      receives_.emplace_back(channel->collectives)
          .receive(at(posted_), size_of(posted_), *parent_, tags_.data);
      ++posted_;
    }
    // In the order of their numbers: the children's receives are posted so.
    while (!receives_.empty() && receives_.front().are_over()) {
      receives_.pop_front();
      pass_on(arrived_++);
      has_moved_ = true;
    }
    if (arrived_ < pieces_ || !sends_->are_over()) return false;
    if (plan_.finish) plan_.finish();
    return true;
  }

 private:
  void begin() {
    has_moved_ = true;
    sends_.emplace(channel->collectives);
    const int size = channel->size;
    const int place = (channel->rank - plan_.root + size) % size;  // the root's is 0
    const auto rank_at = [&](int other) { return (other + plan_.root) % size; };
    // The lowest bit of a place says who its parent is; those below, who its children are.
    int bit = 1;
    while (bit < size && (place & bit) == 0) bit <<= 1;
    if (place != 0) parent_ = rank_at(place - bit);
    for (bit >>= 1; bit > 0; bit >>= 1) {
      if (place + bit < size) children_.push_back(rank_at(place + bit));
    }
    pieces_ = std::max<size_t>((plan_.bytes + kBroadcastPiece - 1) / kBroadcastPiece, 1);
    if (parent_) return;
    posted_ = pieces_;
    while (arrived_ < pieces_) pass_on(arrived_++);
  }

  void pass_on(size_t piece) {
    for (const int child : children_) sends_->send(at(piece), size_of(piece), child, tags_.data);
  }

  std::byte* at(size_t piece) const { return plan_.data + piece * kBroadcastPiece; }
  size_t size_of(size_t piece) const {
    return std::min(kBroadcastPiece, plan_.bytes - piece * kBroadcastPiece);
  }

  BroadcastPlan plan_;
  const Tags tags_;
  std::optional<int> parent_;
  std::vector<int> children_;
  size_t pieces_ = 0;
  size_t posted_ = 0;   // pieces whose receive is posted
  size_t arrived_ = 0;  // pieces that were passed on
  std::deque<Transfers> receives_;
  std::optional<Transfers> sends_;
};

}  // namespace

OperationPtr make_exchange(ExchangePlan plan, Tags tags) {
  return std::make_unique<Exchange>(std::move(plan), tags);
}

OperationPtr make_broadcast(BroadcastPlan plan, Tags tags) {
  return std::make_unique<Broadcast>(std::move(plan), tags);
}

}  // namespace ddp::backends::mpi
