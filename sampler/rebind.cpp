#include "rebind.h"

#include <algorithm>
#include <string>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <ddp/internal/packed_texts.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using Standing = ShardCursor::Standing;

// Returns where this rank stands, and then the fields that have to be equal, as "key=value".
std::vector<std::string> words_of(const ShardCursor& cursor) {
  const auto s = cursor.standing();
  std::vector<std::string> words{
      ddp::str(s.epoch, " ", s.position, " ", s.next_own, " ", s.step_size, " ", s.over)};
  for (const auto& [key, value] : cursor.identifying_fields()) {
    words.push_back(ddp::str(key, "=", value));
  }
  return words;
}

Standing standing_from(const std::string& text) {
  Standing standing;
  InputText fields(text);
  fields >> standing.epoch >> standing.position >> standing.next_own >> standing.step_size >>
      standing.over;
  return standing;
}

std::vector<Standing> standings_in(const std::vector<std::string>& by_rank) {
  std::vector<Standing> standings;
  for (const auto& text : by_rank) standings.push_back(standing_from(unpacked(text).at(0)));
  return standings;
}

const Standing& furthest(const std::vector<Standing>& standings) {
  return *std::max_element(standings.begin(), standings.end(), [](const auto& a, const auto& b) {
    return a.epoch != b.epoch ? a.epoch < b.epoch : a.position < b.position;
  });
}

std::string describe_place(const Standing& standing) {
  return ddp::str("epoch ", standing.epoch, ", position ", standing.position);
}

std::string find_misfit(const std::vector<std::string>& by_rank, Tail tail) {
  const auto first = unpacked(by_rank.front());
  const auto standings = standings_in(by_rank);
  const auto& agreed = furthest(standings);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto words = unpacked(by_rank[rank]);
    for (size_t i = 1; i < first.size(); ++i) {
      if (words.at(i) == first[i]) continue;
      return ddp::str(
          "expected the same order on every rank, got ", first[i], " on rank 0 and ", words[i],
          " on rank ", rank, " of ", by_rank.size(),
          ". Construct the sampler alike on every rank.");
    }
    const auto& own = standings[rank];
    // At the end of an order that does not divide evenly, some ranks have no sample in a step.
    const bool has_no_more = tail == Tail::kUneven && own.next_own >= agreed.position;
    const bool is_same = own.epoch == agreed.epoch && own.step_size == agreed.step_size &&
                         (own.position == agreed.position || has_no_more);
    if (is_same) continue;
    return ddp::str(
        "expected every rank to have used as many samples, got ", describe_place(own), " on rank ",
        rank, " of ", by_rank.size(), ", and ", describe_place(agreed),
        " on another. Let all ranks end the same step before, and load() another rank's state on a "
        "rank that joins.");
  }
  return "";
}

}  // namespace

void rebind(ShardCursor& cursor, const ProcessGroup& group) {
  const auto& options = cursor.options();
  const auto texts = agree(
      packed(words_of(cursor)), group, "comparing the positions of samplers",
      [&](const std::vector<std::string>& by_rank) {
        const auto text = find_misfit(by_rank, options.shard.tail);
        return text.empty() ? "" : options.name + "::rebind: " + text;
      });
  const auto standings = standings_in(texts);
  auto agreed = furthest(standings);
  const bool may_end_early = options.shard.tail == Tail::kDrop;
  agreed.over =
      (may_end_early || agreed.position >= options.order.size) &&
      std::any_of(standings.begin(), standings.end(), [](const Standing& s) { return s.over; });
  cursor.rebind(group->getSize(), group->getRank(), agreed);
}

}  // namespace ddp
