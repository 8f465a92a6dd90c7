#include <ddp/sharded_sampler.h>

#include <string>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

#include "shard_cursor.h"

namespace ddp {
namespace {

using Standing = ShardCursor::Standing;

constexpr const char* kConstructAlike =
    "Construct the sampler and the data set alike on every rank. Each process draws random numbers "
    "of its own: shuffle or split a data set with a seed that all ranks share.";

// Appends the fields as "key=value", for the comparison with other ranks.
void append(std::vector<std::string>& words, const std::vector<ShardCursor::Field>& fields) {
  for (const auto& [key, value] : fields) words.push_back(ddp::str(key, "=", value));
}

std::string describe_different_order(
    const std::string& first, const std::string& other, const std::string& where) {
  return ddp::str(
      "expected the same order on every rank, got ", first, " on rank 0 and ", other, where);
}

// For check_dataset(), one text per field of this rank: why it cannot load its items, or "", then
// the sampler's common fields, then the hash of the items.
std::vector<std::string> words_of_data_set(
    const ShardCursor& cursor, const std::function<void(detail::ItemHash&)>& hash_first_items) {
  detail::ItemHash hash;
  std::vector<std::string> words{problem_of([&] { hash_first_items(hash); })};
  append(words, cursor.common_fields());
  words.push_back(std::to_string(hash.value()));
  return words;
}

// Returns "" where every rank has the same fields as rank 0, and none has a problem.
std::string describe_different_data(
    const std::vector<std::vector<std::string>>& by_rank, size_t items) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& problem = by_rank[rank].front();
    if (!problem.empty()) {
      return ddp::str(
          "expected every rank to load its first ", items, " items, got an error on rank ", rank,
          " of ", by_rank.size(), ": ", problem);
    }
  }
  const auto& first = by_rank.front();
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (size_t i = 1; i < first.size(); ++i) {
      const auto& word = by_rank[rank].at(i);
      if (word == first[i]) continue;
      const bool is_hash = i + 1 == first.size();
      const auto of_all =
          ddp::str(" on rank ", rank, " of ", by_rank.size(), ". ", kConstructAlike);
      if (!is_hash) return describe_different_order(first[i], word, of_all);
      return ddp::str(
          "expected the same data set on every rank, got another size, or other items among the "
          "first ",
          items, ", than rank 0's", of_all);
    }
  }
  return "";
}

// For rebind(), the standing of this rank, and then the fields that have to be equal, as
// "key=value".
std::vector<std::string> words_of_standing(const ShardCursor& cursor) {
  const auto s = cursor.standing();
  std::vector<std::string> words{
      ddp::str(s.epoch, " ", s.position, " ", s.next_own, " ", s.step_size, " ", s.over)};
  append(words, cursor.identifying_fields());
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

std::string describe_different_standing(const std::vector<std::string>& by_rank, Tail tail) {
  const auto first = unpacked(by_rank.front());
  const auto standings = standings_in(by_rank);
  const auto& agreed = furthest(standings);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto words = unpacked(by_rank[rank]);
    for (size_t i = 1; i < first.size(); ++i) {
      if (words.at(i) == first[i]) continue;
      return describe_different_order(
          first[i], words[i],
          ddp::str(
              " on rank ", rank, " of ", by_rank.size(),
              ". Construct the sampler alike on every rank."));
    }
    const auto& own = standings[rank];
    // At the end of an order that does not divide evenly, some ranks have no sample in a step.
    const bool has_no_more = tail == Tail::kUneven && own.next_own >= agreed.position;
    // Before the first step of an epoch, the size of a step is that of the ranks so far: a process
    // that joins has other ones.
    const bool same_steps = agreed.position == 0 || own.step_size == agreed.step_size;
    const bool is_same =
        own.epoch == agreed.epoch && same_steps && (own.position == agreed.position || has_no_more);
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

ShardedSampler::ShardedSampler(std::shared_ptr<ShardCursor> cursor)
    : torch::data::samplers::DistributedSampler<>(
          static_cast<size_t>(cursor->options().order.size),
          static_cast<size_t>(cursor->options().shard.num_replicas),
          static_cast<size_t>(cursor->options().shard.rank),
          /*allow_duplicates=*/cursor->options().shard.tail == Tail::kRepeat),
      cursor_(std::move(cursor)) {}

void ShardedSampler::set_epoch(size_t epoch) { cursor_->set_epoch(static_cast<int64_t>(epoch)); }

size_t ShardedSampler::epoch() const { return static_cast<size_t>(cursor_->epoch()); }

void ShardedSampler::reset(std::optional<size_t> new_size) { cursor_->reset(new_size); }

std::optional<std::vector<size_t>> ShardedSampler::next(size_t batch_size) {
  return cursor_->next(batch_size);
}

std::optional<std::vector<size_t>> ShardedSampler::next_of(size_t global) {
  return cursor_->next_of(global);
}

void ShardedSampler::rebind(const GroupArg& group) {
  const auto ranks = group.get();
  const auto& options = cursor_->options();
  const auto texts = agree(
      packed(words_of_standing(*cursor_)), ranks, "comparing the positions of samplers",
      [&](const std::vector<std::string>& by_rank) {
        const auto text = describe_different_standing(by_rank, options.shard.tail);
        return text.empty() ? "" : options.name + "::rebind: " + text;
      });
  const auto standings = standings_in(texts);
  auto agreed = furthest(standings);
  const bool may_end_early = options.shard.tail == Tail::kDrop;
  agreed.over =
      (may_end_early || agreed.position >= options.order.size) &&
      std::any_of(standings.begin(), standings.end(), [](const Standing& s) { return s.over; });
  cursor_->rebind(ranks->getSize(), ranks->getRank(), agreed);
}

std::function<void()> ShardedSampler::bookmark() const {
  return [cursor = cursor_, standing = cursor_->standing()] { cursor->go_to(standing); };
}

bool ShardedSampler::is_over() const { return cursor_->standing().over; }

void ShardedSampler::stop() {
  auto end = cursor_->standing();
  end.over = true;
  cursor_->go_to(end);
}

void ShardedSampler::consume(size_t samples) { cursor_->consume(samples); }

size_t ShardedSampler::size() const { return static_cast<size_t>(cursor_->size()); }

size_t ShardedSampler::offset() const { return static_cast<size_t>(cursor_->offset()); }

void ShardedSampler::save(torch::serialize::OutputArchive& archive) const {
  cursor_->save(archive);
}

void ShardedSampler::load(torch::serialize::InputArchive& archive) { cursor_->load(archive); }

void ShardedSampler::check_same_on_all_ranks(
    const std::function<void(detail::ItemHash&)>& hash_first_items, size_t items,
    const GroupArg& group) const {
  const auto ranks = group.get();
  const auto own = packed(words_of_data_set(*cursor_, hash_first_items));
  agree(own, ranks, "comparing the ranks' data sets", [&](const std::vector<std::string>& texts) {
    std::vector<std::vector<std::string>> by_rank;
    for (const auto& words : texts) by_rank.push_back(unpacked(words));
    const auto text = describe_different_data(by_rank, items);
    return text.empty() ? "" : cursor_->options().name + "::check_dataset: " + text;
  });
}

void detail::ItemHash::add(const at::Tensor& tensor) {
  const auto here = tensor.detach().cpu().contiguous();
  add(static_cast<int>(here.scalar_type()));
  for (const auto size : here.sizes()) add(size);
  add_bytes(here.const_data_ptr(), here.nbytes());
}

void detail::ItemHash::add(const std::string& text) { add_bytes(text.data(), text.size()); }

void detail::ItemHash::add_bytes(const void* data, size_t size) {
  value_ = mixed(value_, hash_of_bytes(data, size));
}

}  // namespace ddp
