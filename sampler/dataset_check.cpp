#include "dataset_check.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kRemedy =
    "Construct the sampler and the data set alike on every rank. Each process draws random numbers "
    "of its own: shuffle or split a data set with a seed that all ranks share.";

// Returns one text per field of this rank: why it cannot load its items, or "", then the sampler's
// common fields, then the hash of the items.
std::vector<std::string> fields_of_rank(
    const ShardCursor& cursor, const std::function<void(detail::ItemHash&)>& hash_first_items) {
  detail::ItemHash hash;
  std::vector<std::string> words{problem_of([&] { hash_first_items(hash); })};
  for (const auto& [key, value] : cursor.common_fields())
    words.push_back(ddp::str(key, "=", value));
  words.push_back(std::to_string(hash.value()));
  return words;
}

// Returns "" where every rank has the same fields as rank 0, and none has a problem.
std::string find_difference(const std::vector<std::vector<std::string>>& by_rank, size_t items) {
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
      const auto of_all = ddp::str(" on rank ", rank, " of ", by_rank.size(), ". ", kRemedy);
      if (!is_hash) {
        return ddp::str(
            "expected the same order on every rank, got ", first[i], " on rank 0 and ", word,
            of_all);
      }
      return ddp::str(
          "expected the same data set on every rank, got another size, or other items among the "
          "first ",
          items, ", than rank 0's", of_all);
    }
  }
  return "";
}

}  // namespace

void check_dataset(
    const ShardCursor& cursor, const std::function<void(detail::ItemHash&)>& hash_first_items,
    size_t items, const ProcessGroup& group) {
  const auto own = packed(fields_of_rank(cursor, hash_first_items));
  agree(own, group, "comparing the ranks' data sets", [&](const std::vector<std::string>& texts) {
    std::vector<std::vector<std::string>> by_rank;
    for (const auto& words : texts) by_rank.push_back(unpacked(words));
    const auto text = find_difference(by_rank, items);
    return text.empty() ? "" : cursor.options().name + "::check_dataset: " + text;
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
