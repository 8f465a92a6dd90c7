#include "stream/position.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kNumbers = "position";
constexpr const char* kFields = "fields";
constexpr const char* kOtherStream =
    ". Make the stream with the same source and options, or call set_epoch() instead of load() to "
    "start that epoch.";
constexpr const char* kOtherRank =
    ". With by_shard(true) each rank loads within an epoch what it saved itself: give the stream "
    "to Checkpointer::add_per_rank instead of add, and resume with as many ranks; or call "
    "set_epoch() instead of load() to start that epoch.";

std::string numbers_of(const StreamPosition& p) {
  return ddp::str(
      p.epoch, ' ', p.base, ' ', p.buffer.position, ' ', p.buffer.mark.file, ' ',
      p.buffer.mark.offset, ' ', p.buffer.mark.within, ' ', p.over);
}

StreamPosition position_of(const std::string& numbers, bool& is_whole) {
  StreamPosition p;
  InputText text(numbers);
  auto& mark = p.buffer.mark;
  text >> p.epoch >> p.base >> p.buffer.position >> mark.file >> mark.offset >> mark.within >>
      p.over;
  is_whole = !text.fail() && p.epoch >= 0 && p.buffer.position >= 0 &&
             p.base >= p.buffer.position && mark.file >= 0 && mark.offset >= 0 && mark.within >= 0;
  return p;
}

std::vector<std::string> words_of(const StreamFields& fields) {
  std::vector<std::string> words;
  for (const auto& [key, value] : fields) words.push_back(ddp::str(key, "=", value));
  return words;
}

bool is_of_rank(const std::string& fact) {
  return begins_with(fact, "num_replicas=") || begins_with(fact, "rank=");
}

std::string read_text(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  DDP_CHECK_VALUE(
      archive.try_read(key, value) && value.isString(),
      "ShardedStream::load: expected a text named ", '"', key,
      "\", got none or something else. Pass an archive that ShardedStream::save wrote.");
  return value.toStringRef();
}

struct Words {
  StreamPosition position;
  bool has_more = true, begins_anywhere = true;
  std::string begun;
  std::vector<std::string> fields;
};

Words words_in(const std::string& text) {
  auto all = unpacked(text);
  Words words;
  bool is_whole = true;
  words.position = position_of(all.at(0), is_whole);
  words.has_more = all.at(1) == "1";
  words.begins_anywhere = all.at(2) == "1";
  words.begun = all.at(3);
  words.fields.assign(all.begin() + 4, all.end());
  return words;
}

std::vector<Words> all_words(const std::vector<std::string>& by_rank) {
  std::vector<Words> all;
  for (const auto& text : by_rank) all.push_back(words_in(text));
  return all;
}

bool is_before(const StreamPosition& a, const StreamPosition& b) {
  return a.epoch != b.epoch ? a.epoch < b.epoch : a.base < b.base;
}

const StreamPosition& furthest(const std::vector<Words>& all) {
  return std::max_element(
             all.begin(), all.end(),
             [](const Words& a, const Words& b) { return is_before(a.position, b.position); })
      ->position;
}

std::string place_of(const StreamPosition& position) {
  return ddp::str("epoch ", position.epoch, ", position ", position.base);
}

std::string first_difference(
    const std::vector<std::string>& one, const std::vector<std::string>& other) {
  for (size_t i = 0; i < std::max(one.size(), other.size()); ++i) {
    const auto a = i < one.size() ? one[i] : "none", b = i < other.size() ? other[i] : "none";
    if (a != b) return ddp::str(a, " on rank 0 and ", b);
  }
  return "";
}

std::string text_of_rank(size_t rank, size_t ranks) {
  return ddp::str(" on rank ", rank, " of ", ranks, ". ");
}

std::string problem_of_facts(
    const std::vector<std::string>& own, const std::vector<std::string>& first, size_t rank,
    size_t ranks) {
  const auto difference = first_difference(first, own);
  if (difference.empty()) return "";
  return ddp::str(
      "the same source and options on every rank, got ", difference, text_of_rank(rank, ranks),
      "Make the stream alike on every rank, with the files in the same order.");
}

std::string problem_of_rank(const Words& own, const Words& first, size_t rank, size_t ranks) {
  const auto of_all = text_of_rank(rank, ranks);
  auto facts = problem_of_facts(own.fields, first.fields, rank, ranks);
  if (!facts.empty()) return facts;
  if (own.begun != "0") {
    return ddp::str(
        "a position between batches on every rank, got ", own.begun,
        " samples of a batch in which next() threw", of_all, "Call next() there again before.");
  }
  if (own.begins_anywhere) return "";
  return ddp::str(
      "the begin or the end of an epoch with by_shard(true), got ", place_of(own.position), of_all,
      "Call it between two epochs, or let the ranks take turns by sample.");
}

}  // namespace

StreamPosition rebased(const StreamPosition& position, int64_t ranks) {
  auto begun = position;
  begun.base = position.next(ranks);
  begun.taken = 0;
  return begun;
}

void save_position(
    torch::serialize::OutputArchive& archive, const StreamPosition& rebased,
    const StreamFields& fields) {
  archive.write(kNumbers, numbers_of(rebased));
  archive.write(kFields, packed(words_of(fields)));
}

StreamPosition load_position(
    torch::serialize::InputArchive& archive,
    c10::function_ref<StreamFields(const StreamPosition&)> fields_at) {
  bool is_whole = false;
  const auto position = position_of(read_text(archive, kNumbers), is_whole);
  std::vector<std::string> saved;
  const auto problem = problem_of([&] { saved = unpacked(read_text(archive, kFields)); });
  DDP_CHECK_VALUE(
      is_whole && problem.empty(),
      "ShardedStream::load: expected a position, got a text that is none. The archive is damaged: "
      "load another.");
  const auto own = words_of(fields_at(position));
  for (size_t i = 0; i < std::max(saved.size(), own.size()); ++i) {
    const auto was = i < saved.size() ? saved[i] : "none", is = i < own.size() ? own[i] : "none";
    DDP_CHECK_VALUE(
        was == is, "ShardedStream::load: expected ", was, " as when it was saved, got ", is,
        is_of_rank(was) || is_of_rank(is) ? kOtherRank : kOtherStream);
  }
  return position;
}

std::string text_of(const StreamStanding& standing) {
  std::vector<std::string> words{
      numbers_of(standing.position), standing.has_more ? "1" : "0",
      standing.begins_anywhere ? "1" : "0", std::to_string(standing.begun)};
  for (auto& word : words_of(standing.fields)) words.push_back(std::move(word));
  return packed(words);
}

std::string text_of(const StreamFields& fields) { return packed(words_of(fields)); }

std::string problem_of_fields(const std::vector<std::string>& by_rank) {
  const auto first = unpacked(by_rank.at(0));
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const auto problem = problem_of_facts(unpacked(by_rank[rank]), first, rank, by_rank.size());
    if (!problem.empty()) return "ShardedStream::next: expected " + problem;
  }
  return "";
}

std::string problem_of_standings(const std::vector<std::string>& by_rank) {
  const auto all = all_words(by_rank);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto problem = problem_of_rank(all[rank], all[0], rank, all.size());
    if (!problem.empty()) return "ShardedStream::rebind: expected " + problem;
  }
  const auto& agreed = furthest(all);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& own = all[rank].position;
    const bool is_there = own.base == agreed.base || !all[rank].has_more;
    if (own.epoch == agreed.epoch && is_there) continue;
    return ddp::str(
        "ShardedStream::rebind: expected every rank to have used as many samples, got ",
        place_of(own), " on rank ", rank, " of ", all.size(), ", and ", place_of(agreed),
        " on another. Let all ranks end the same step before, and load() another rank's state on a "
        "rank that joins.");
  }
  return "";
}

StreamPosition agreed_position(const std::vector<std::string>& by_rank, bool drops_end) {
  const auto all = all_words(by_rank);
  auto agreed = furthest(all);
  const auto has_ended = [](const Words& words) { return !words.has_more; };
  agreed.over = drops_end ? std::any_of(all.begin(), all.end(), has_ended)
                          : std::all_of(all.begin(), all.end(), has_ended);
  return agreed;
}

}  // namespace ddp
