#include "stream/order.h"

#include <numeric>
#include <utility>

#include <ddp/internal/hash.h>

namespace ddp {
namespace {

// Fisher and Yates' shuffle, with numbers that are the same in every build.
template <typename Values>
void shuffle(Values& values, uint64_t seed) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[mix_bits(seed + i) % i]);
  }
}

}  // namespace

std::vector<size_t> shuffled_numbers(size_t count, uint64_t seed) {
  std::vector<size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  shuffle(numbers, seed);
  return numbers;
}

OrderReader::OrderReader(StreamOrder order, const BufferStart& from)
    : order_(std::move(order)),
      reader_(order_.source->read(order_.files, from.mark)),
      start_(from) {}

StreamRecord* OrderReader::at(int64_t position) {
  while (position >= start_.position + static_cast<int64_t>(records_.size())) {
    if (!read_buffer()) return nullptr;
  }
  return &records_[static_cast<size_t>(position - start_.position)];
}

bool OrderReader::read_buffer() {
  const size_t size = order_.buffer > 0 ? static_cast<size_t>(order_.buffer) : 1;
  std::vector<StreamRecord> records;
  BufferStart start{start_.position + static_cast<int64_t>(records_.size()), reader_->mark()};
  while (records.size() < size) {
    auto load = reader_->next();
    if (!load) break;
    records.push_back({std::move(load), reader_->last()});
  }
  if (records.empty()) return false;
  if (order_.buffer > 0) {
    shuffle(records, mix_bits(order_.seed + static_cast<uint64_t>(start.position)));
  }
  start_ = start;
  records_ = std::move(records);
  return true;
}

std::optional<DealtRecord> RecordDealer::next() {
  if (reader_.at(round_) == nullptr) return std::nullopt;
  DealtRecord dealt;
  dealt.start = reader_.buffer();
  dealt.position = round_ + part_.rank;
  auto* own = reader_.at(dealt.position);
  if (own == nullptr) return std::nullopt;
  dealt.record = std::move(*own);
  round_ += part_.ranks;
  if (part_.whole_rounds && reader_.at(round_ - 1) == nullptr) return std::nullopt;
  return dealt;
}

}  // namespace ddp
