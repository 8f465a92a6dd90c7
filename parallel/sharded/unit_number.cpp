#include "sharded/unit_number.h"

namespace ddp {
namespace {

constexpr int kDigits = kNumberNotes / 2;

int64_t digit_of(int64_t number, int digit) { return number >> digit & 1; }

}  // namespace

void write_number(int64_t number, float* notes) {
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto is_one = digit_of(number, digit);
    notes[2 * digit] = is_one ? 0.F : 1.F;
    notes[2 * digit + 1] = is_one ? 1.F : 0.F;
  }
}

std::optional<int64_t> read_number(const float* sums, int64_t number, int64_t others) {
  bool is_same = true, is_of_all_others = true;
  int64_t written = 0;
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto mine = digit_of(number, digit);
    const auto like_mine = sums[2 * digit + mine], unlike_mine = sums[2 * digit + 1 - mine];
    const bool differs = unlike_mine != 0;
    if (differs) {
      is_same = false;
      is_of_all_others &= unlike_mine == like_mine * static_cast<float>(others);
    }
    written |= (differs ? 1 - mine : mine) << digit;
  }
  if (is_same) return std::nullopt;
  return is_of_all_others ? written : 0;
}

}  // namespace ddp
