// The exchange of the ranks of a bootstrap through their store.
#include <atomic>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/backends/shm/backend/bootstrap.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::backends;
using namespace std::chrono_literals;
using namespace ddp::testing;

namespace {

/// Counts the ranks' operations.
class CountingStore : public c10d::HashStore {
 public:
  explicit CountingStore(bool is_extended) : is_extended_(is_extended) {}

  using HashStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count(1);
    HashStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    count(1);
    return HashStore::get(key);
  }
  void wait(
      const std::vector<std::string>& names, const std::chrono::milliseconds& timeout) override {
    count(names.size());
    HashStore::wait(names, timeout);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& names) override {
    count(names.size());
    return HashStore::multiGet(names);
  }
  bool hasExtendedApi() const override { return is_extended_; }

  std::atomic<int> operations{0};
  std::atomic<int> keys{0};  // of all operations

 private:
  void count(size_t of_operation) {
    ++operations;
    keys += static_cast<int>(of_operation);
  }

  const bool is_extended_;
};

Setup setup_of(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  Setup setup;
  setup.store = store;
  setup.rank = rank;
  setup.world_size = size;
  setup.timeout = 20s;
  setup.connect_by = ddp::Deadline(20s);
  for (int other = 0; other < size; ++other) setup.global_ranks.push_back(other);
  return setup;
}

/// The error of rank 0 of two, if rank 1 has written these entries.
std::string error_with(const std::string& host, const std::string& memory) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("host/1", host);
  store->set("memory/1", memory);
  store->set("state/1", "=");
  return error_of<c10::Error>([&] { shm::bootstrap(setup_of(store, 0, 2), {"a", 0}); });
}

}  // namespace

TEST_CASE("a bootstrap makes the same number of requests per rank at any size", "[shm][ranks]") {
  const int size = GENERATE(2, 5);
  const bool is_extended = GENERATE(true, false);
  CAPTURE(size, is_extended);
  const auto store = c10::make_intrusive<CountingStore>(is_extended);
  const auto errors = errors_of_ranks(size, [&](const Rank& self) {
    const auto made = shm::bootstrap(setup_of(store, self.rank, self.size), {"a", 1 << 18});
    TORCH_CHECK(made.backend, made.why_not);
  });
  CHECK(errors == std::vector<std::string>(static_cast<size_t>(size)));
  constexpr int kRounds = 3;
  const int of_first = is_extended ? 4 : 3 + size;  // set, wait, multiGet or gets, set
  const int of_others = 3;                          // set, wait, get
  CHECK(store->operations == kRounds * (of_first + (size - 1) * of_others));
  // Each rank that read all entries would have the store find the square.
  CHECK(store->keys == kRounds * ((2 * size + 2) + (size - 1) * 3));
}

TEST_CASE("a malformed entry is an error that names it and its rank", "[shm][errors]") {
  const auto [memory, got] = GENERATE(table<std::string, std::string>({
      {"=", "\"\""},
      {"=1 2 3", "\"1 2 3\""},
      {"=1 2 4096 7 8", "\"1 2 4096 7 8\""},
      {"=0 2 4096 7", "\"0 2 4096 7\""},
      {"=1 -2 4096 7", "\"1 -2 4096 7\""},
      {"=1 2 4095 7", "\"1 2 4095 7\""},
      {"=1 2 -4096 7", "\"1 2 -4096 7\""},
      {"", "\"\""},
      {"else", "\"else\""},
  }));
  CAPTURE(memory);
  CHECK_THAT(
      error_with("=a", memory),
      ContainsText("backend shm: expected ") &&
          ContainsText(
              " in the store's entry memory/1 of rank 1 of 2, got " + got +
              ". Use a store, or a prefix of one, to which nothing else writes."));
}

TEST_CASE("an entry of all ranks that is malformed is an error that names it", "[shm][errors]") {
  const auto* const text = GENERATE("", "1", "1 a", "1 a9 b", "1 a1 b1 c", "1 a-1 b", "x a1 b");
  CAPTURE(text);
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("host/0/all", text);
  const auto error = error_of<c10::Error>([&] { shm::bootstrap(setup_of(store, 1, 2), {"a", 0}); });
  CHECK_THAT(
      error, ContainsText(
                 "process group: expected the values of 2 ranks in the store's entry host/0/all, "
                 "got \"" +
                 std::string(text) + "\" on rank 1. Use a store"));
}

TEST_CASE("the first problem of a rank is the reason on all ranks", "[shm][errors]") {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("host/1", "!no such host");
  CHECK(shm::bootstrap(setup_of(store, 0, 2), {"a", 0}).why_not == "rank 1: no such host");
}
