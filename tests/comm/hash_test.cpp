// Ranks whose builds differ compare these hashes, so this test pins the values.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <ddp/internal/hash.h>

#include "support/catch.h"

namespace ddp {
namespace {

uint64_t hash_of_text(const std::string& text) { return hash_of_bytes(text.data(), text.size()); }

uint64_t hash_of_floats(const std::vector<float>& values) {
  return hash_of_bytes(values.data(), values.size() * sizeof(float));
}

TEST_CASE("a hash that ranks compare is the same in every build", "[hash][pure]") {
  CHECK(fnv1a("") == 0xcbf29ce484222325);  // as published
  CHECK(fnv1a("a") == 0xaf63dc4c8601ec8c);
  CHECK(fnv1a("foobar") == 0x85944171f73967e8);
  CHECK(hash_of_text("") == 0xbf50e6debd09ffab);
  CHECK(hash_of_text("a") == 0x02ae7f62e402cbd8);
  CHECK(hash_of_text("0123456789abcdefghijklmnopqrstuvwxyz") == 0x395190733a6fb569);
}

TEST_CASE("each bit of a tensor, and its length, changes its hash", "[hash][pure]") {
  for (const size_t size : {1, 8, 31, 32, 33, 100}) {
    std::string bytes(size, '\x5a');
    std::set<uint64_t> seen{hash_of_text(bytes)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      const auto flip = static_cast<char>(1 << bit % 8);
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ flip);
      seen.insert(hash_of_text(bytes));
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ flip);
    }
    CHECK(seen.size() == 8 * size + 1);
  }
  std::set<uint64_t> of_zeros;
  for (size_t size = 0; size < 100; ++size) of_zeros.insert(hash_of_text(std::string(size, '\0')));
  CHECK(of_zeros.size() == 100);
}

TEST_CASE("changes of a tensor's numbers do not cancel each other out", "[hash][pure]") {
  std::vector<float> values(64);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1 + static_cast<float>(i);
  std::set<uint64_t> seen{hash_of_floats(values)};
  size_t expected = 1;
  for (size_t a = 0; a < values.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      auto changed = values;
      std::swap(changed[a], changed[b]);
      seen.insert(hash_of_floats(changed));
      changed = values;
      changed[a] = -changed[a];
      changed[b] = -changed[b];
      seen.insert(hash_of_floats(changed));
      expected += 2;
    }
  }
  CHECK(seen.size() == expected);
}

}  // namespace
}  // namespace ddp
