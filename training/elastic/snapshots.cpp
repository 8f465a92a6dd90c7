#include "elastic/snapshots.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <ddp/collectives.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <ddp/internal/zero_shards.h>

#include "elastic/flat_state.h"

namespace ddp::elastic {
namespace {

constexpr int64_t kSentAtOnce = int64_t{16} << 20;
constexpr int kShardTag = 0x5348;

/// Copies of this rank's shards on the host, which are whole after copies.wait().
std::vector<c10::IValue> own_shards(std::vector<Part>& parts, TensorsOnHost& copies) {
  std::vector<c10::IValue> shards;
  for (auto& part : parts) {
    if (part.sharded() == nullptr) continue;
    shards.push_back(copied_to_host(own_shard(*part.sharded()), copies));
  }
  return shards;
}

void take_from_shards(std::vector<Part>& parts, const std::string& text) {
  const auto shards = unpacked(text);
  size_t next = 0;
  for (auto& part : parts) {
    if (part.sharded() != nullptr) {
      take_from_shard(*part.sharded(), part.on_own_device(unpacked_state(shards.at(next++))));
    }
  }
}

/// The bytes of a text, as a tensor that shares its memory.
at::Tensor bytes_in(std::string& text) {
  return at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::kByte);
}

/// Sends a text to one rank, and receives those of others, whose sizes are known.
void exchange_texts(
    std::string& own, int to, std::map<int, std::string>& received, const ProcessGroup& group) {
  std::vector<std::pair<at::Tensor, int>> incoming;
  auto outgoing = bytes_in(own);
  int64_t longest = to == group->getRank() ? 0 : outgoing.numel();
  for (auto& [rank, text] : received) {
    incoming.emplace_back(bytes_in(text), rank);
    longest = std::max(longest, incoming.back().first.numel());
  }
  const auto piece_of = [](const at::Tensor& bytes, int64_t at) {
    const auto begin = std::min(at, bytes.numel());
    return bytes.narrow(0, begin, std::min(kSentAtOnce, bytes.numel() - begin));
  };
  for (int64_t at = 0; at < longest; at += kSentAtOnce) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> pieces;
    for (const auto& [bytes, rank] : incoming) {
      pieces.push_back(piece_of(bytes, at));
      if (pieces.back().numel() > 0) {
        works.push_back(recv_async(pieces.back(), rank, kShardTag, group));
      }
    }
    const auto piece = piece_of(outgoing, at);
    if (to != group->getRank() && piece.numel() > 0) {
      works.push_back(send_async(piece, to, kShardTag, group));
    }
    for (const auto& work : works) work->wait();
  }
}

}  // namespace

std::vector<int> keepers_of(const std::vector<std::string>& hosts) {
  std::vector<std::vector<int>> ranks_of;  // by host, in the order of their first ranks
  std::map<std::string, size_t> number_of;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto number = number_of.emplace(hosts[rank], ranks_of.size()).first->second;
    if (number == ranks_of.size()) ranks_of.emplace_back();
    ranks_of[number].push_back(static_cast<int>(rank));
  }
  const bool is_one = ranks_of.size() == 1;
  std::vector<int> keepers(hosts.size());
  for (size_t host = 0; host < ranks_of.size(); ++host) {
    const auto& next = ranks_of[(host + 1) % ranks_of.size()];
    for (size_t i = 0; i < ranks_of[host].size(); ++i) {
      keepers[static_cast<size_t>(ranks_of[host][i])] = next[(is_one ? i + 1 : i) % next.size()];
    }
  }
  return keepers;
}

void Snapshots::take(
    const ProcessGroup& group, std::vector<Part>& parts, const Progress& progress) {
  const int rank = group->getRank();
  Snapshot now;
  now.ranks = group->getSize();
  now.progress = progress;
  TensorsOnHost copies;
  for (auto& part : parts) now.states.push_back(copied_to_host(part.state(), copies));
  const auto shards = own_shards(parts, copies);
  copies.wait();
  auto own = packed(c10::fmap(shards, packed_state));
  const auto texts = gather_strings(
      packed({host_name(), std::to_string(last_number_), std::to_string(own.size())}), group,
      "taking a snapshot");
  std::vector<std::string> hosts;
  std::vector<size_t> sizes;
  for (const auto& text : texts) {
    const auto fields = unpacked(text);
    hosts.push_back(fields.at(0));
    now.number = std::max<int64_t>(now.number, std::stoll(fields.at(1)) + 1);
    sizes.push_back(std::stoull(fields.at(2)));
  }
  const auto keepers = keepers_of(hosts);
  for (int other = 0; other < now.ranks; ++other) {
    const auto i = static_cast<size_t>(other);
    if (keepers[i] == rank && other != rank) now.shards[other].resize(sizes[i]);
  }
  exchange_texts(own, keepers[static_cast<size_t>(rank)], now.shards, group);
  now.shards[rank] = std::move(own);
  last_number_ = now.number;
  if (kept_.size() == 2) kept_.erase(kept_.begin());
  kept_.push_back(std::move(now));
  // Afterwards all ranks have it. A barrier's backend may be a device's.
  gather_strings("", group, "taking a snapshot");
  kept_.erase(kept_.begin(), kept_.end() - 1);
}

/// Packed: for each its number, how many ranks there were, and the sizes of the shards by rank.
std::string Snapshots::described(const std::vector<Snapshot>& snapshots) {
  std::vector<std::string> texts;
  for (const auto& snapshot : snapshots) {
    auto text = ddp::str(snapshot.number, " ", snapshot.ranks);
    for (const auto& [rank, shard] : snapshot.shards) {
      text += ddp::str(" ", rank, " ", shard.size());
    }
    texts.push_back(std::move(text));
  }
  return packed(texts);
}

bool Snapshots::choose(const ProcessGroup& group) {
  struct Found {
    int holders = 0;
    std::vector<Place> places;
  };
  const auto texts = gather_strings(described(kept_), group, "looking for a snapshot");
  std::map<int64_t, Found> all;
  int ranks_with_any = 0;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto descriptions = unpacked(texts[rank]);
    ranks_with_any += descriptions.empty() ? 0 : 1;
    for (const auto& description : descriptions) {
      InputText words(description);
      int64_t number = 0;
      size_t ranks = 0, shard = 0, bytes = 0;
      words >> number >> ranks;
      auto& found = all[number];
      ++found.holders;
      found.places.resize(ranks);
      while (words >> shard >> bytes) found.places.at(shard) = {static_cast<int>(rank), bytes};
    }
  }
  chosen_ = 0;
  for (auto& [number, found] : all) {
    const bool is_whole = all_of(found.places, [](const Place& place) { return place.rank >= 0; });
    if (!is_whole || found.holders < ranks_with_any) continue;
    chosen_ = number;
    places_ = std::move(found.places);
  }
  drop_if(kept_, [this](const Snapshot& one) { return one.number != chosen_; });
  return chosen_ > 0;
}

void Snapshots::go_back(std::vector<Part>& parts, Progress& progress) const {
  if (kept_.empty()) return;
  const auto& snapshot = kept_.back();
  for (size_t i = 0; i < parts.size(); ++i) parts[i].load(snapshot.states.at(i));
  progress = snapshot.progress;
}

void Snapshots::redistribute_shards(const ProcessGroup& group, std::vector<Part>& parts) const {
  for (size_t shard = 0; shard < places_.size(); ++shard) {
    const auto& place = places_[shard];
    std::string text(place.bytes, '\0');
    if (place.rank == group->getRank()) text = kept_.back().shards.at(static_cast<int>(shard));
    auto bytes = bytes_in(text);
    if (place.bytes > 0) broadcast(bytes, place.rank, group);
    take_from_shards(parts, text);
  }
}

}  // namespace ddp::elastic
